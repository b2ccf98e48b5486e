"""Sums and activations that follow a norm, done in the norm's own pass over memory."""

from normkit.conversion.fuse.fuse import FusePlan as FusePlan
from normkit.conversion.fuse.fuse import fuse as fuse
from normkit.conversion.fuse.fuse import plan_fuse as plan_fuse
