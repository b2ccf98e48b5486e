"""Tests on paired differences: Student's t, equivalence, sign flips, and Holm's correction."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence

from normkit.core.optional_dependencies import require
from normkit.errors import OptionError

ALPHA = 0.05  # of every verdict: the p-value of revisiting BN, section 4.3
BETTER, WORSE, EQUIVALENT, NOT_SHOWN = "better", "worse", "equivalent", "not shown"
EXACT = 16  # up to so many pairs every pattern of signs is tried: 65,536
SAMPLES = 20_000  # beyond, so many patterns, always the same ones


def paired_t(a: Sequence[float], b: Sequence[float]) -> tuple[float, float]:
    """Two p-values: that a is not larger than b, and that a is not smaller, seed by seed.

    One-sided: the rule by which revisiting BN prints a number in bold.

    >>> better, worse = paired_t([0.91, 0.93, 0.92], [0.90, 0.91, 0.91])
    >>> round(better, 3), round(worse, 3)
    (0.029, 0.971)
    """
    if len(a) != len(b):
        raise OptionError(
            f"{len(a)} scores cannot be paired with {len(b)}: expected one of each for every seed. "
            "Try to leave out the seeds that only one of them has finished."
        )
    differences = [ours - theirs for ours, theirs in zip(a, b, strict=True)]
    return p_above(differences), p_above([-each for each in differences])


def p_above(differences: Sequence[float], bound: float = 0.0) -> float:
    """The p-value of "their mean is not above the bound".

    Differences that are all the same leave the t-test without a scale. Then n signs are all that
    is known: it is 2⁻ⁿ likely that they all point upwards by chance, as the sign-flip test says.
    """
    mean, std = mean_and_std(differences)
    count = len(differences)
    if std == 0:
        return 0.5**count if mean > bound else 1.0
    student = require("scipy.special", "lab", "the lab's statistics").stdtr
    return float(student(count - 1, (bound - mean) * math.sqrt(count) / std))


def tost(differences: Sequence[float], margin: float) -> float:
    """Two one-sided tests: the p-value of "the mean difference is the margin or more".

    A small one shows that whatever difference there is does not matter.

    >>> round(tost([0.001, -0.001, 0.0, 0.001, -0.001], margin=0.005), 5)
    0.00018
    """
    return max(p_above(differences, -margin), p_above([-each for each in differences], -margin))


def sign_flip(differences: Sequence[float]) -> float:
    """How likely random signs make the sum of the differences as large, in either direction.

    It assumes nothing but that a difference could as well have had the other sign, and so checks
    the t-test by other means. With n pairs it cannot be below 2·2⁻ⁿ: 0.0625 for 5.

    >>> sign_flip([0.3, 0.1, 0.2])
    0.25
    """
    _check_finite(differences)
    observed = abs(math.fsum(differences))
    # sums of the same numbers in another order may differ in the last digits, and must tie
    enough = observed - 1e-9 * math.fsum(map(abs, differences))
    if len(differences) <= EXACT:
        sums = [0.0]
        for each in differences:
            sums = [total + each for total in sums] + [total - each for total in sums]
        return sum(abs(each) >= enough for each in sums) / len(sums)
    signs = random.Random(0)
    large = 0
    for _ in range(SAMPLES):
        bits = signs.getrandbits(len(differences))
        total = sum(each if bits >> k & 1 else -each for k, each in enumerate(differences))
        large += abs(total) >= enough
    return (large + 1) / (SAMPLES + 1)  # the observed signs are one of the patterns


def effect(differences: Sequence[float]) -> float:
    """Cohen's d of paired data: the mean difference in units of its standard deviation.

    Where all differences are the same it is infinite, or 0 if they are 0.

    >>> effect([1.0, 2.0, 3.0])
    2.0
    """
    mean, std = mean_and_std(differences)
    if std:
        return mean / std
    return math.copysign(math.inf, mean) if mean else 0.0


def mean_and_std(differences: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation (n − 1); a spread that is only rounding is 0."""
    if len(differences) < 2:
        raise OptionError(
            f"{len(differences)} paired difference(s) have no spread: expected at least 2. "
            "Try more seeds."
        )
    _check_finite(differences)
    std = statistics.stdev(differences)
    # 0.97 − 0.96 and 0.98 − 0.97 differ in the last digit: a t-test would call that overwhelming
    rounding = 1e-12 * max(map(abs, differences))
    return statistics.fmean(differences), std if std > rounding else 0.0


def _check_finite(differences: Sequence[float]) -> None:
    """A NaN would make a p-value of 0, or an error that says nothing, further on."""
    bad = [each for each in differences if not math.isfinite(each)]
    if bad:
        raise OptionError(
            f"{bad[0]} cannot be tested: expected finite differences. "
            "Try to leave out the seeds that diverged, and to count them."
        )


def holm(ps: Sequence[float]) -> list[float]:
    """p-values with Holm's correction for their number, in the order in which they came.

    After it, the chance to be wrong in any of the comparisons is still 5 %. NaN is a comparison
    that was planned and could not be made: it counts as one, and stays NaN.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    corrected = [math.nan] * len(ps)
    largest = 0.0
    for place, factor in sorted(enumerate(holm_factors(ps)), key=lambda each: -each[1]):
        if not math.isnan(ps[place]):
            largest = max(largest, min(1.0, factor * ps[place]))
            corrected[place] = largest
    return corrected


def holm_factors(ps: Sequence[float]) -> list[int]:
    """By how much each p-value is multiplied: the smallest by all, the largest by 1."""
    # NaN last: it must not shield another p-value from its factor
    order = sorted(range(len(ps)), key=lambda place: (math.isnan(ps[place]), ps[place]))
    factors = [0] * len(ps)
    for rank, place in enumerate(order):
        factors[place] = len(ps) - rank
    return factors


def verdict(p_better: float, p_worse: float, p_equivalent: float, alpha: float = ALPHA) -> str:
    """What the p-values show, in one word. NaN, of a test that could not be made, shows nothing.

    A difference that is certain and too small to matter is called by its direction: the interval
    beside it says how small it is.

    >>> verdict(p_better=0.3, p_worse=0.7, p_equivalent=0.01)
    'equivalent'
    """
    if p_better <= alpha:
        return BETTER
    if p_worse <= alpha:
        return WORSE
    return EQUIVALENT if p_equivalent <= alpha else NOT_SHOWN
