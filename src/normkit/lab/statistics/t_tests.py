"""The paired t-test, one-sided: the rule by which revisiting BN prints a number in bold."""

from __future__ import annotations

import math
from collections.abc import Sequence

from normkit.lab.statistics.spread import mean_and_std, paired
from normkit.models import require


def paired_t(a: Sequence[float], b: Sequence[float]) -> tuple[float, float]:
    """Two p-values: that a is not larger than b, and that a is not smaller, seed by seed.

    >>> better, worse = paired_t([0.91, 0.93, 0.92], [0.90, 0.91, 0.91])
    >>> round(better, 3), round(worse, 3)
    (0.029, 0.971)
    """
    differences = paired(a, b)
    return above(differences), above([-each for each in differences])


def above(differences: Sequence[float], bound: float = 0.0) -> float:
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
    return max(above(differences, -margin), above([-each for each in differences], -margin))
