"""The papers in one call each. Every recipe returns a plan: print it, ``apply`` it, ``undo`` it."""

from normkit.conversion.recipes.bgn import bgn as bgn
from normkit.conversion.recipes.bgn import groups_for as groups_for
from normkit.conversion.recipes.bnet import bnet as bnet
from normkit.conversion.recipes.ibn import ibn as ibn
from normkit.conversion.recipes.micro_batch import micro_batch as micro_batch
from normkit.conversion.recipes.scaled_bn import scaled_bn as scaled_bn
from normkit.conversion.recipes.ubn import ubn as ubn
from normkit.conversion.recipes.xbn import xbn as xbn
