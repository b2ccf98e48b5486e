"""The mean and the spread of paired differences, and what to do when there is no spread."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from normkit.errors import OptionError

ALPHA = 0.05  # of every verdict: the p-value of revisiting BN, section 4.3


def paired(a: Sequence[float], b: Sequence[float]) -> list[float]:
    """a − b, seed by seed.

    >>> paired([0.5, 0.75], [0.25, 0.25])
    [0.25, 0.5]
    """
    if len(a) != len(b):
        raise OptionError(
            f"{len(a)} scores cannot be paired with {len(b)}: expected one of each for every seed. "
            "Try to leave out the seeds that only one of them has finished."
        )
    return [ours - theirs for ours, theirs in zip(a, b, strict=True)]


def check_finite(differences: Sequence[float]) -> None:
    """A NaN would make a p-value of 0, or an error that says nothing, further on."""
    bad = [each for each in differences if not math.isfinite(each)]
    if bad:
        raise OptionError(
            f"{bad[0]} is no difference to test: expected finite numbers. "
            "Try to leave out the seeds that diverged, and to count them."
        )


def mean_and_std(differences: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation (n − 1); a spread that is only rounding is 0."""
    if len(differences) < 2:
        raise OptionError(
            f"{len(differences)} paired difference(s) have no spread: expected at least 2. "
            "Try more seeds."
        )
    check_finite(differences)
    std = statistics.stdev(differences)
    # 0.97 − 0.96 and 0.98 − 0.97 differ in the last digit: a t-test would call that overwhelming
    rounding = 1e-12 * max(map(abs, differences))
    return statistics.fmean(differences), std if std > rounding else 0.0


def effect(differences: Sequence[float]) -> float:
    """Cohen's d of paired data: the mean difference in units of its standard deviation.

    Where all differences are the same it is infinite, or 0 if they are 0.

    >>> effect([1.0, 2.0, 3.0])
    2.0
    """
    mean, std = mean_and_std(differences)
    if std:
        return mean / std
    return 0.0 if mean == 0 else float("inf") if mean > 0 else float("-inf")
