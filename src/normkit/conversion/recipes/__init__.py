"""The papers in one call each. Every recipe returns a plan: print it, ``apply`` it, ``undo`` it."""

from normkit.conversion.recipes.assembly import Recipe as Recipe
from normkit.conversion.recipes.bgn import RECIPE as _BGN
from normkit.conversion.recipes.bgn import bgn as bgn
from normkit.conversion.recipes.bgn import groups_for as groups_for
from normkit.conversion.recipes.bnet import RECIPE as _BNET
from normkit.conversion.recipes.bnet import bnet as bnet
from normkit.conversion.recipes.ibn import RECIPE as _IBN
from normkit.conversion.recipes.ibn import ibn as ibn
from normkit.conversion.recipes.micro_batch import RECIPE as _MICRO_BATCH
from normkit.conversion.recipes.micro_batch import micro_batch as micro_batch
from normkit.conversion.recipes.scaled_bn import RECIPE as _SCALED_BN
from normkit.conversion.recipes.scaled_bn import scaled_bn as scaled_bn
from normkit.conversion.recipes.small_batch import small_batch as small_batch
from normkit.conversion.recipes.ubn import RECIPE as _UBN
from normkit.conversion.recipes.ubn import ubn as ubn
from normkit.conversion.recipes.xbn import RECIPE as _XBN
from normkit.conversion.recipes.xbn import xbn as xbn

RECIPES: dict[str, Recipe] = {
    recipe.plan.__name__: recipe
    for recipe in (_BGN, _BNET, _IBN, _MICRO_BATCH, _SCALED_BN, _UBN, _XBN)
}
"""What an experiment's file may name."""
