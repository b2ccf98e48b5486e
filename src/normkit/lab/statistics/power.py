"""How many more seeds would decide, if the differences seen so far are what they seem.

That is a guess, as good as the few seeds it is made from. Simulated with 3 … 10 seeds and true
effects that vary as much as a difference does from seed to seed, so many more seeds decided in
73 to 94 % of the cases. Where there is no difference at all a small number promises too much:
after 5 more seeds or fewer, 1 case in 3 was decided, for that needs far more than 5.

Who adds seeds because of this number and tests again has a second chance to be wrong: where there
is no difference, "better" came up in 9 to 11 % instead of 5 % after one round, 11 to 13 % after
three.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from normkit.core.optional_dependencies import require
from normkit.lab.statistics.paired_tests import ALPHA, mean_and_std

POWER = 0.8  # the usual one: so likely does the number of seeds decide
MOST = 1000  # pairs; what needs more is, for a lab, undecidable


def more_seeds(
    differences: Sequence[float],
    margin: float,
    *,
    alpha: float = ALPHA,
    alpha_equivalent: float | None = None,
) -> int | None:
    """About so many more pairs show a difference, or that there is none that matters.

    The level of each test may be smaller than 5 % to allow for Holm's correction. None: more
    than 1,000 would be needed, or there are not 2 pairs to judge from.

    >>> more_seeds([0.004, -0.002, 0.003, 0.001, 0.002], margin=0.001)
    10
    """
    if len(differences) < 2:
        return None
    mean, std = mean_and_std(differences)
    count = len(differences)
    if std == 0:  # see p_above: the p-value is 2⁻ⁿ
        level = alpha if mean else alpha_equivalent or alpha
        decidable = mean != 0 or margin > 0
        return max(1, math.ceil(-math.log2(level)) - count) if decidable else None
    shown = _fewest(lambda n: _power(n, abs(mean) / std, alpha))
    level = alpha_equivalent or alpha
    equal = _fewest(
        lambda n: (
            _power(n, (margin - mean) / std, level) + _power(n, (margin + mean) / std, level) - 1
        )
    )
    needed = [n for n in (shown, equal) if n is not None]
    return max(1, min(needed) - count) if needed else None


def _power(count: int, effect: float, alpha: float) -> float:
    """The probability that a one-sided paired t-test with so many pairs finds the effect."""
    special = require("scipy.special", "lab", "the lab's statistics")
    critical = special.stdtrit(count - 1, 1 - alpha)
    return 1 - float(special.nctdtr(count - 1, effect * math.sqrt(count), critical))


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
