"""Verdicts on all comparisons of an experiment together, each from the interval beside it.

One procedure decides: a two-sided paired t-test of each comparison, with Holm's correction, so
that a difference which does not exist is called better or worse in 5 % of experiments at most. Its
intervals are those of the same test at the level that Holm grants to each comparison. So they
contain 0 just where nothing is shown, and each of them, never narrower than a plain 95 % interval,
contains the true difference in at least 95 % of experiments.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from normkit.lab.statistics.looks import PlannedLooks
from normkit.lab.statistics.paired import ALPHA, interval, paired_t, tost, two_sided

BETTER, WORSE, EQUIVALENT, NOT_SHOWN = "better", "worse", "equivalent", "not shown"
UNSTABLE = "unstable"  # runs were lost: what the others show is about survivors


@dataclass(frozen=True)
class Decision:
    """What the differences of one comparison show; NaN where there are not 2 of them."""

    verdict: str
    low: float
    high: float
    alpha: float  # the chance of error that is granted to the interval
    p_better: float = math.nan  # one-sided, not corrected: the rule of revisiting BN
    p_worse: float = math.nan
    p_difference: float = math.nan  # two-sided, not corrected
    p_difference_holm: float = math.nan  # at most 5 % where the interval does not contain 0
    p_equivalent: float = math.nan  # two one-sided tests, not corrected
    p_equivalent_holm: float = math.nan  # at most 5 % where the interval is within the margin


def decide(
    family: Sequence[Sequence[float]],
    margin: float,
    *,
    corrected: bool = True,
    stable: Sequence[bool] | None = None,
    looks: Sequence[int] = (),
) -> list[Decision]:
    """A decision on each comparison of an experiment, given its paired differences.

    Comparisons with fewer than 2 pairs, and those that are not stable, count in the correction
    and decide nothing. ``corrected=False`` tests each comparison as if it were the only one;
    ``looks`` are the numbers of seeds after which one has looked or may look (see ``looks``).

    >>> [each.verdict for each in decide([[3.0, 3.1, 2.9], [0.1, -0.2, 0.1]], margin=0.1)]
    ['better', 'not shown']
    """
    judged = [True] * len(family) if stable is None else stable
    planned = PlannedLooks(tuple(looks) or (2,))
    ps = [
        planned.overall(two_sided(each)) if sure and len(each) > 1 else math.nan
        for each, sure in zip(family, judged, strict=True)
    ]
    factors = holm_factors(ps) if corrected else [1] * len(ps)
    after = holm(ps) if corrected else ps
    decisions = []
    for differences, sure, factor, p in zip(family, judged, factors, after, strict=True):
        alpha = planned.nominal(ALPHA / factor)
        if len(differences) < 2:
            word = NOT_SHOWN if sure else UNSTABLE
            decisions.append(Decision(word, math.nan, math.nan, alpha))
            continue
        low, high = interval(differences, alpha)
        equivalent = tost(differences, margin)
        decisions.append(
            Decision(
                verdict(low, high, margin) if sure else UNSTABLE,
                low,
                high,
                alpha,
                *paired_t(differences, [0.0] * len(differences)),
                two_sided(differences),
                p,
                equivalent,
                min(1.0, factor * planned.overall(2 * equivalent)) if sure else math.nan,
            )
        )
    return decisions


def verdict(low: float, high: float, margin: float) -> str:
    """What an interval shows, in one word.

    A difference that is certain and too small to matter is called by its direction: the interval
    itself says how small it is.

    >>> verdict(0.1, 0.3, 0.5), verdict(-0.1, 0.3, 0.5), verdict(-0.1, 0.6, 0.5)
    ('better', 'equivalent', 'not shown')
    """
    if low > 0:
        return BETTER
    if high < 0:
        return WORSE
    return EQUIVALENT if -margin < low and high < margin else NOT_SHOWN


def holm(ps: Sequence[float]) -> list[float]:
    """p-values with Holm's correction for their number, in the order in which they came.

    After it, the chance to be wrong in any of the comparisons is still 5 %. NaN is a comparison
    that was planned and could not be made: it counts as one, and stays NaN.

    >>> [round(p, 3) for p in holm([0.01, 0.04, 0.03])]
    [0.03, 0.06, 0.06]
    """
    # statsmodels' multipletests gives the same, and collects garbage at every call: 0.1 s each
    corrected = [math.nan] * len(ps)
    largest = 0.0
    for rank, place in enumerate(_order(ps)):
        if not math.isnan(ps[place]):
            largest = max(largest, min(1.0, (len(ps) - rank) * ps[place]))
            corrected[place] = largest
    return corrected


def _order(ps: Sequence[float]) -> list[int]:
    """Their places from the smallest on; NaN last: it must not shield another from its factor."""
    return sorted(range(len(ps)), key=lambda place: (math.isnan(ps[place]), ps[place]))


def holm_factors(ps: Sequence[float]) -> list[int]:
    """By how much the 5 % are divided for each comparison: what Holm tested it with in the end.

    Those that are shown, from the smallest p-value on, by the number of all, all but one, …; all
    others by the number that is left, at which Holm stopped.
    """
    order = _order(ps)
    factors = [1] * len(ps)
    factor, last = len(ps), math.nan
    for rank, place in enumerate(order):
        left = len(ps) - rank
        shown = ps[place] * left <= ALPHA
        if shown and ps[place] != last:  # equal p-values share the first one's factor
            factor, last = left, ps[place]
        elif not shown:
            for rest in order[rank:]:
                factors[rest] = left
            break
        factors[place] = factor
    return factors
