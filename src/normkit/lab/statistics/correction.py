"""Holm's correction: many comparisons, and still a chance of 5 % to be wrong in any of them."""

from __future__ import annotations

import math
from collections.abc import Sequence


def holm(ps: Sequence[float]) -> list[float]:
    """p-values corrected for their number, in the order in which they came.

    NaN is a comparison that was planned and could not be made: it counts as one, and stays NaN.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    corrected = [math.nan] * len(ps)
    largest = 0.0
    for place, factor in sorted(enumerate(factors(ps)), key=lambda each: -each[1]):
        if math.isnan(ps[place]):
            continue
        largest = max(largest, min(1.0, factor * ps[place]))
        corrected[place] = largest
    return corrected


def factors(ps: Sequence[float]) -> list[int]:
    """By how much each p-value is multiplied: the smallest by all, the largest by 1."""
    # NaN last: it must not shield another p-value from its factor
    order = sorted(range(len(ps)), key=lambda place: (math.isnan(ps[place]), ps[place]))
    found = [0] * len(ps)
    for rank, place in enumerate(order):
        found[place] = len(ps) - rank
    return found
