"""Gradient accumulation that is exact for batch normalization."""

from normkit.calibration.accumulation.accumulate import Accumulation as Accumulation
from normkit.calibration.accumulation.accumulate import accumulate as accumulate
