"""One word for a comparison."""

from __future__ import annotations

from normkit.lab.statistics.spread import ALPHA

BETTER, WORSE, EQUIVALENT, NOT_SHOWN = "better", "worse", "equivalent", "not shown"


def verdict(p_better: float, p_worse: float, p_equivalent: float, alpha: float = ALPHA) -> str:
    """What the p-values show. NaN, of a test that could not be made, shows nothing.

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
