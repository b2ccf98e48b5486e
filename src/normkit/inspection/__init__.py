"""What is in a model, and what happens in it while it runs. Looks, and changes nothing."""

from normkit.inspection.batches import call_model as call_model
from normkit.inspection.checks import refuse_wrapped as refuse_wrapped
from normkit.inspection.flow import convolutions_before_norms as convolutions_before_norms
from normkit.inspection.kinds import is_activation as is_activation
from normkit.inspection.kinds import kind_of as kind_of
from normkit.inspection.run import undisturbed as undisturbed
from normkit.inspection.selection import select as select
from normkit.inspection.site import Site as Site
from normkit.inspection.site import WeightSite as WeightSite
from normkit.inspection.site import channels_of as channels_of
from normkit.inspection.survey import Survey as Survey
from normkit.inspection.survey import survey as survey
