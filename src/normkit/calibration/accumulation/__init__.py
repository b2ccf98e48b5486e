"""Gradient accumulation that is exact for batch normalization."""

from normkit.calibration.accumulation.accumulate import accumulate as accumulate
from normkit.calibration.accumulation.steps import Accumulation as Accumulation
