"""Looks that were planned: seeds are added until a verdict is there, and it still errs in 5 %.

    looks = [5, 10, 20]     # in the experiment's file; the last one is the most that are trained

Every look is tested at the same level, smaller than 5 %, which is chosen so that all looks
together err in 5 % (Pocock 1977). With so few seeds the usual tables, made for normal
variables, err too often: here the level comes from simulated t-tests on growing samples, always
the same ones. The intervals at that level are repeated confidence intervals (Jennison and
Turnbull 1989): one may look at them at every look, decided or not.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

from normkit.core.optional_dependencies import require
from normkit.lab.statistics.paired import ALPHA

PATHS, AT_ONCE = 400_000, 20_000
COUNTED = 2000  # simulated p-values that a level must leave below it to be read from the sample
FARTHER = 1e-3  # of the last level read: from there on looks are counted as if independent


class PlannedLooks:
    """The price of looking several times, for tests after so many seeds each.

    >>> looks = PlannedLooks((5, 10, 20))
    >>> 0.018 < looks.nominal(0.05) < 0.021  # each look, for 5 % of all three
    True
    """

    def __init__(self, looks: tuple[int, ...]) -> None:
        self.looks = looks

    def overall(self, p: float) -> float:
        """How likely the smallest p-value of all looks is as small as this, with no difference."""
        if math.isnan(p) or len(self.looks) < 2:
            return p
        smallest = _smallest_p_values(self.looks)
        edge = float(smallest[COUNTED - 1])
        if p >= edge:
            numpy = require("numpy", "lab", "planned looks")
            return float(numpy.searchsorted(smallest, p, side="right")) / len(smallest)
        # too few to count: their number per p grows towards that of independent looks
        times = COUNTED / len(smallest) / edge
        share = min(1.0, math.log(p / edge) / math.log(FARTHER)) if p > 0 else 1.0
        return p * (times + share * (len(self.looks) - times))

    def nominal(self, alpha: float = ALPHA) -> float:
        """The level of each look at which all of them together err with the chance alpha."""
        low, high = alpha / len(self.looks), alpha
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (middle, high) if self.overall(middle) <= alpha else (low, middle)
        return low


@lru_cache(maxsize=8)
def _smallest_p_values(looks: tuple[int, ...]) -> Any:
    """Of simulated experiments without a difference: the smallest p-value of all looks, sorted."""
    numpy = require("numpy", "lab", "planned looks")
    special = require("scipy.special", "lab", "planned looks")
    generator = numpy.random.default_rng(20)
    counts = numpy.array(looks)
    parts = []
    for _ in range(PATHS // AT_ONCE):
        draws = generator.standard_normal((AT_ONCE, looks[-1]))
        sums = draws.cumsum(1)[:, counts - 1]
        squares = (draws**2).cumsum(1)[:, counts - 1]
        variances = (squares - sums**2 / counts) / (counts - 1)
        t = numpy.abs(sums) / numpy.sqrt(counts * variances)
        parts.append((2 * special.stdtr(counts - 1, -t)).min(1))
    return numpy.sort(numpy.concatenate(parts))
