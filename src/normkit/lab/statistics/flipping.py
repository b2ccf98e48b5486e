"""The sign-flip test: no assumption but that a difference could as well have had the other sign."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from normkit.lab.statistics.spread import check_finite

EXACT = 16  # up to so many pairs every pattern of signs is tried: 65,536
SAMPLES = 20_000  # beyond, so many patterns, always the same ones


def sign_flip(differences: Sequence[float]) -> float:
    """How likely random signs make the sum of the differences as large, in either direction.

    It needs no normal distribution and checks the t-test by other means. With n pairs it cannot
    be below 2·2⁻ⁿ: 0.0625 for 5.

    >>> sign_flip([0.3, 0.1, 0.2])
    0.25
    """
    check_finite(differences)
    observed = abs(math.fsum(differences))
    # sums of the same numbers in another order may differ in the last digits, and must tie
    enough = observed - 1e-9 * math.fsum(map(abs, differences))
    if len(differences) <= EXACT:
        sums = _every_sum(differences)
        return sum(abs(each) >= enough for each in sums) / len(sums)
    signs = random.Random(0)
    large = sum(abs(_random_sum(differences, signs)) >= enough for _ in range(SAMPLES))
    return (large + 1) / (SAMPLES + 1)  # the observed signs are one of the patterns


def _every_sum(differences: Sequence[float]) -> list[float]:
    sums = [0.0]
    for each in differences:
        sums = [total + each for total in sums] + [total - each for total in sums]
    return sums


def _random_sum(differences: Sequence[float], signs: random.Random) -> float:
    bits = signs.getrandbits(len(differences))
    return sum(each if bits >> place & 1 else -each for place, each in enumerate(differences))
