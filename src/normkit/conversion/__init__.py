"""Changes to a user's model."""

from normkit.conversion import recipes as recipes
from normkit.conversion.certificate import Certificate as Certificate
from normkit.conversion.certificate import certificates as certificates
from normkit.conversion.convert import convert as convert
from normkit.conversion.convert import plan_conversion as plan_conversion
from normkit.conversion.fit.data import Fit as Fit
from normkit.conversion.fit.report import FitReport as FitReport
from normkit.conversion.fold import FoldPlan as FoldPlan
from normkit.conversion.fold import fold as fold
from normkit.conversion.fold import plan_fold as plan_fold
from normkit.conversion.freeze import freeze as freeze
from normkit.conversion.freeze import frozen as frozen
from normkit.conversion.freeze import unfreeze as unfreeze
from normkit.conversion.fuse import FusePlan as FusePlan
from normkit.conversion.fuse import fuse as fuse
from normkit.conversion.fuse import plan_fuse as plan_fuse
from normkit.conversion.levels import PooledLevels as PooledLevels
from normkit.conversion.levels import pool_levels as pool_levels
from normkit.conversion.levels import unpool_levels as unpool_levels
from normkit.conversion.param_groups import param_groups as param_groups
from normkit.conversion.plan import Plan as Plan
from normkit.conversion.plan import Step as Step
from normkit.conversion.standardize import fold_weights as fold_weights
from normkit.conversion.standardize import standardize as standardize
