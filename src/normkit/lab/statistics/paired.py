"""Paired differences: tests, the interval of their mean, and how many more would decide."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from normkit.core.optional_dependencies import require
from normkit.errors import OptionError

ALPHA = 0.05  # the chance of a wrong verdict, in an experiment as a whole
EXACT = 16  # up to so many pairs every pattern of signs is tried: 65,536
SAMPLES = 20_000  # beyond, so many patterns, always the same ones
POWER = 0.8  # the usual one: so likely does the number of seeds decide
MOST = 1000  # pairs; what needs more is, for a lab, undecidable


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
    student = _scipy("special").stdtr
    return float(student(count - 1, (bound - mean) * math.sqrt(count) / std))


def two_sided(differences: Sequence[float]) -> float:
    """The p-value of "their mean is 0", in either direction: what verdicts are drawn from.

    >>> round(two_sided([0.01, 0.02, 0.01]), 3)
    0.057
    """
    up, down = paired_t(differences, [0.0] * len(differences))
    return min(1.0, 2 * min(up, down))


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
    numpy = require("numpy", "lab", "the lab's statistics")
    if len(differences) <= EXACT:
        sums = numpy.zeros(1)
        for each in differences:
            sums = numpy.concatenate([sums + each, sums - each])
        return float((abs(sums) >= enough).mean())
    large = int((abs(_patterns(len(differences)) @ numpy.array(differences)) >= enough).sum())
    return (large + 1) / (SAMPLES + 1)  # the observed signs are one of the patterns


@lru_cache(maxsize=4)
def _patterns(count: int) -> Any:
    """Random signs, always the same ones."""
    numpy = require("numpy", "lab", "the lab's statistics")
    return 2.0 * numpy.random.default_rng(0).integers(0, 2, (SAMPLES, count)) - 1


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


def interval(differences: Sequence[float], alpha: float = ALPHA) -> tuple[float, float]:
    """Where the true mean difference is: Student's interval, which errs with the chance alpha.

    It contains 0 just where ``two_sided`` is above alpha. docs/verdicts.md has what was simulated
    to choose it. Differences that are all the same have no spread to judge by, and their signs
    alone decide: the interval has no width if they suffice, and no end if they do not.

    >>> low, high = interval([0.010, 0.012, 0.007, 0.015, 0.011])
    >>> round(low, 4), round(high, 4)
    (0.0074, 0.0146)
    """
    mean, std = mean_and_std(differences)
    count = len(differences)
    if std == 0:
        decided = 2 * 0.5**count <= alpha
        return (mean, mean) if decided else (-math.inf, math.inf)
    # 1 − alpha/2 would round a small alpha away
    half = -float(_scipy("special").stdtrit(count - 1, alpha / 2)) * std / math.sqrt(count)
    return mean - half, mean + half


def more_seeds(differences: Sequence[float], margin: float, alpha: float = ALPHA) -> int | None:
    """About so many more pairs show a difference, or that there is none that matters.

    That is a guess, as good as the few seeds it is made from; who adds seeds because of it and
    tests again has a second chance to be wrong, unless the looks were planned (see ``looks``).
    ``alpha`` is that of the interval, smaller than 5 % where there are several comparisons. None:
    more than 1,000 would be needed, or there are not 2 pairs to judge from.

    >>> more_seeds([0.004, -0.002, 0.003, 0.001, 0.002], margin=0.001)
    14
    """
    if len(differences) < 2:
        return None
    mean, std = mean_and_std(differences)
    count = len(differences)
    if std == 0:  # see interval: signs decide
        decidable = mean != 0 or margin > 0
        return max(1, math.ceil(1 - math.log2(alpha)) - count) if decidable else None
    shown = _fewest(lambda n: _power(n, abs(mean) / std, alpha, "two-sided"))
    equal = _fewest(
        lambda n: (
            _power(n, (margin - mean) / std, alpha / 2, "larger")
            + _power(n, (margin + mean) / std, alpha / 2, "larger")
            - 1
        )
    )
    needed = [n for n in (shown, equal) if n is not None]
    return max(1, min(needed) - count) if needed else None


def _power(count: int, effect: float, alpha: float, alternative: str) -> float:
    """The probability that a paired t-test with so many pairs finds the effect."""
    power = require("statsmodels.stats.power", "lab", "the lab's statistics").TTestPower
    return float(power().power(effect, count, alpha, alternative=alternative))


def _fewest(power: Callable[[int], float]) -> int | None:
    """The smallest number of pairs with enough power, which grows with their number."""
    enough = 2
    while power(enough) < POWER:
        if enough >= MOST:
            return None
        enough = min(2 * enough, MOST)
    too_few = enough // 2 if enough > 2 else 1
    while enough - too_few > 1:
        middle = (enough + too_few) // 2
        too_few, enough = (too_few, middle) if power(middle) >= POWER else (middle, enough)
    return enough


def _scipy(module: str) -> Any:
    return require(f"scipy.{module}", "lab", "the lab's statistics")
