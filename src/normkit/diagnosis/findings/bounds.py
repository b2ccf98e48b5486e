"""From where on a number is a finding, and why there.

The unit of most of them is the **output error** of a layer, √ of ``measures.output_error`` averaged
over its channels: how far wrong statistics move the standardized output, whose own size is 1. It
has no unit, so that layers, models and data sets can be compared. With exact statistics of n
independent values it is about √(1.5 / n): 1/n from the mean and 1/(2n) from the standard deviation
of a normal distribution.
"""

from __future__ import annotations

import math

from torch import Tensor

WRONG = 1.0
"""Output error from which on it is serious: the error is as strong as the signal."""

OFF = 0.5
"""Output error that is a warning: a quarter of the power of the output is error."""

FITS = 0.1
"""Output error at which statistics fit the data, whatever their history: 1 % of the power."""

SURE = 3.0
"""Standard errors that a number has to lie above what chance makes: 1 in 700 does so by chance."""

START_LEFT = 0.05
"""Share of the start values that may be left in running statistics, (1 − momentum)^batches."""

FEW_IMAGES = 4
"""Images a batch at which batch norm is known to fail: bgn (Table 2) finds 4 points of accuracy
lost at 4 images and 10 at 2, but 1 at 8. No alarm if their statistics are good all the same:"""

MANY_VALUES = 150.0
"""Independent values behind the statistics of a batch that give an output error of 0.1."""

FEW_VALUES = 8.0
"""Independent values below which statistics are too noisy whatever the number of images: an output
error above 0.4."""

LARGE_SCALE = 10.0
"""|γ| that multiplies gradients by ten; it starts at 1 and is seldom above 3 after training."""

HUGE_SCALE = 100.0

DEAD = 0.25
"""Share of dead channels in a layer that is a warning. Some die in healthy training."""

MOSTLY = 0.5
"""More than half of the channels or gates of a layer."""

NEARLY_ALL = 0.9

FACTOR_OF_TWO = math.log(2.0)
"""Ratio of standard deviations, as a logarithm, from which on data are on another scale."""

ALIKE_RATIOS = math.log(1.25)
"""Spread of that ratio over the channels of a layer, as a logarithm, if one factor explains it."""

COUNTED = 0.01
"""Relative difference between batches seen and batches counted that is no finding."""


def sampling_error(independent: float) -> float:
    """Output error to expect from statistics of so many independent values."""
    return math.sqrt(1.5 / independent) if independent > 0 else math.inf


def average_error(errors: Tensor) -> float:
    """The output error of a layer, from those of its channels (squares, see ``output_error``)."""
    return float(errors.mean().sqrt())


def averaged_batches(momentum: float) -> float:
    """How many batches a running average of this momentum is worth: (2 − m) / m."""
    return (2 - momentum) / momentum if momentum > 0 else math.inf
