"""Changes to a user's model."""

from normkit.conversion import recipes as recipes
from normkit.conversion.certificate import Certificate as Certificate
from normkit.conversion.convert import convert as convert
from normkit.conversion.fold_plan import FoldPlan as FoldPlan
from normkit.conversion.folding import fold as fold
from normkit.conversion.folding import plan_fold as plan_fold
from normkit.conversion.freezing import freeze as freeze
from normkit.conversion.freezing import frozen as frozen
from normkit.conversion.freezing import unfreeze as unfreeze
from normkit.conversion.fusing import fuse as fuse
from normkit.conversion.param_groups import param_groups as param_groups
from normkit.conversion.plan import Plan as Plan
from normkit.conversion.plan import plan_conversion as plan_conversion
from normkit.conversion.step import Step as Step
from normkit.conversion.weights import fold_weights as fold_weights
from normkit.conversion.weights import standardize as standardize
