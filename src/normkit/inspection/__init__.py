"""What is in a model. Looks, and changes nothing."""

from normkit.inspection.calling import run as run
from normkit.inspection.convolutions import channels_of as channels_of
from normkit.inspection.convolutions import convolutions_before_norms as convolutions_before_norms
from normkit.inspection.kinds import is_activation as is_activation
from normkit.inspection.kinds import kind_of as kind_of
from normkit.inspection.quiet import undisturbed as undisturbed
from normkit.inspection.selection import select as select
from normkit.inspection.site import Site as Site
from normkit.inspection.survey import Survey as Survey
from normkit.inspection.survey import survey as survey
from normkit.inspection.weights import WeightSite as WeightSite
from normkit.inspection.wrappers import refuse_wrapped as refuse_wrapped
