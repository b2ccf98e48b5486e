"""What is in a model. Looks, and changes nothing."""

from normkit.inspection.convolutions import channels_of as channels_of
from normkit.inspection.convolutions import convolutions_before_norms as convolutions_before_norms
from normkit.inspection.convolutions import refuse_wrapped as refuse_wrapped
from normkit.inspection.convolutions import undisturbed as undisturbed
