"""A 95 % interval of the mean paired difference: BCa, made for few seeds, without resampling.

The bias-corrected and accelerated bootstrap (Efron 1987) leans the interval towards the longer
tail. In its usual form it covers 84 % instead of 95 % with 5 seeds, and 92 % with 15. Three
things are different here:

- The bootstrap distribution of a mean is known without drawing from it: the saddlepoint
  approximation (Davison and Hinkley 1988) gives its far tails, always the same, with no seed.
- It is smoothed: resampling n numbers loses 1/n of their variance, and normal noise of just
  that variance is put back. Without it no interval reaches beyond the extreme differences,
  and with 5 seeds all of them lie on one side of the truth in 1 of 16 experiments.
- The normal quantile 1.96 is expanded to t·√(n/(n−1)) (Hesterberg 2015), since the spread is
  estimated too.

Simulated coverage for 5 … 15 seeds, 20,000 experiments each: 95.2 to 95.7 % of normal
differences, 95.0 to 95.7 % of differences of accuracies on 360 images, 94.2 to 95.5 % for
Student's t with 5 degrees of freedom; 93.3 to 95.9 % for Laplace's heavy tails, 95.1 to 96.8 %
for uniform differences. Skewed differences cannot be covered by any method with so few numbers:
91.2 to 93.8 % for exponential ones, where Student's interval has 88.5 to 91.2 %.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from normkit.core.optional_dependencies import require
from normkit.lab.statistics.paired_tests import mean_and_std

LEVEL = 0.95


def interval(differences: Sequence[float]) -> tuple[float, float]:
    """Where the true mean difference is, with a confidence of 95 %.

    Differences that are all the same give an interval without width.

    >>> low, high = interval([0.010, 0.012, 0.007, 0.015, 0.011])
    >>> round(low, 4), round(high, 4)
    (0.0071, 0.0149)
    """
    mean, std = mean_and_std(differences)
    count = len(differences)
    if std == 0:
        return mean, mean
    student = require("scipy.special", "lab", "the lab's statistics").stdtrit
    quantile = float(student(count - 1, (1 + LEVEL) / 2)) * math.sqrt(count / (count - 1))
    residuals = [(each - mean) / std for each in differences]
    low, high = bca(residuals, quantile, noise=1 / count**2)  # variance, of their mean
    return mean + std * low, mean + std * high


def bca(residuals: Sequence[float], quantile: float, noise: float) -> tuple[float, float]:
    """The interval of the mean of residuals (whose own mean is 0).

    The quantile is 1.96 in the textbook; noise is the variance added to the resampled mean.
    """
    squares = math.fsum(each**2 for each in residuals)
    lean = math.fsum(each**3 for each in residuals) / (6 * squares**1.5)
    # acceleration and bias correction: for a mean they are the same number, skewness/6
    moved = [lean + (lean + z) / (1 - lean * (lean + z)) for z in (-quantile, quantile)]
    return _resampled_mean(residuals, moved[0], noise), _resampled_mean(residuals, moved[1], noise)


def _resampled_mean(residuals: Sequence[float], z: float, noise: float) -> float:
    """The value below which resampled means stay with the probability Φ(z), z not near 0."""
    optimize = require("scipy.optimize", "lab", "the lab's statistics")
    sign = math.copysign(1, z)
    high = abs(z) * math.sqrt(len(residuals))  # the tilt, were the means normally distributed
    while sign * _normal(residuals, sign * high, noise)[0] < abs(z):
        high *= 2
    tilt = optimize.brentq(
        lambda tilt: sign * _normal(residuals, sign * tilt, noise)[0] - abs(z), high * 1e-3, high
    )
    return _normal(residuals, sign * tilt, noise)[1]


def _normal(residuals: Sequence[float], tilt: float, noise: float) -> tuple[float, float]:
    """A value in the tail, and how far out it is on the scale of a standard normal variable.

    The cumulants are those of the resampled mean, tilted until the value is its expectation.
    """
    count = len(residuals)
    largest = max(tilt * each for each in residuals) / count
    weights = [math.exp(tilt * each / count - largest) for each in residuals]
    total = math.fsum(weights)
    mean = math.fsum(w * each for w, each in zip(weights, residuals, strict=True)) / total
    spread = math.fsum(w * (each - mean) ** 2 for w, each in zip(weights, residuals, strict=True))
    generating = count * (math.log(total / count) + largest) + tilt**2 * noise / 2
    value = mean + tilt * noise
    variance = spread / total / count + noise
    root = math.copysign(math.sqrt(2 * (tilt * value - generating)), tilt)
    return root + math.log(tilt * math.sqrt(variance) / root) / root, value
