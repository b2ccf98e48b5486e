"""Changes to a user's model."""

from normkit.conversion.weights import fold_weights as fold_weights
from normkit.conversion.weights import standardize as standardize
