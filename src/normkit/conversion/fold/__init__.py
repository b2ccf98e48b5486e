"""Norms and normalized weights, folded into plain convolutions and linear layers."""

from normkit.conversion.fold.fold import FoldPlan as FoldPlan
from normkit.conversion.fold.fold import fold as fold
from normkit.conversion.fold.fold import plan_fold as plan_fold
