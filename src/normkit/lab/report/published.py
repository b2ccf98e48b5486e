"""Numbers that papers print, beside ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from normkit.lab.experiment import Published
from normkit.lab.report.arranging import axes_of
from normkit.lab.report.ranking import shown
from normkit.lab.report.scores import Board, Scores
from normkit.lab.report.styling import Look
from normkit.lab.report.words import value_words
from normkit.lab.results import Comparison


@dataclass(frozen=True)
class Beside:
    """A published number, ours, and how both differ from the baseline's (positive is better)."""

    look: Look
    place: tuple[tuple[Any, str], ...]
    published: Published
    ours: Scores | None
    their_difference: float | None
    our_difference: float | None
    agree: str  # yes, no, or that ours is not shown


def agreement(theirs: float | None, verdict: str, margin: float) -> str:
    """Whether our verdict points the way of the published difference.

    A difference that we have not shown confirms nothing, and contradicts nothing.

    >>> agreement(0.02, "better", 0.005), agreement(0.02, "worse", 0.005)
    ('yes', 'no')
    """
    if theirs is None or verdict not in ("better", "worse", "equivalent"):
        return "" if theirs is None else verdict
    if verdict == "equivalent":
        return "yes" if abs(theirs) <= margin else "no"
    return "yes" if theirs != 0 and (theirs > 0) == (verdict == "better") else "no"


def beside(
    board: Board, looks: Mapping[str, Look], comparisons: Sequence[Comparison]
) -> list[Beside]:
    experiment = board.experiment
    axes = list(axes_of(experiment.cells()))
    sign = 1 if experiment.higher_is_better else -1
    values = {(each.variant, each.cell): each.value for each in experiment.published}
    verdicts = {(c.variant, c.cell): shown(c) for c in comparisons if c.pairs or c.diverged}
    made = []
    for each in experiment.published:
        if each.variant not in looks:  # not part of this scale
            continue
        ours = board.get(each.variant, each.cell)
        base = board.baseline(each.cell)
        theirs = values.get((experiment.baseline, each.cell))
        is_baseline = each.variant == experiment.baseline
        their = None if is_baseline or theirs is None else sign * (each.value - theirs)
        our = None
        if not is_baseline and ours is not None and base is not None:
            known = list(board.differences(ours).values())
            our = sum(known) / len(known) if known else None
        place = tuple(
            (dict(each.cell).get(axis), value_words(dict(each.cell).get(axis))) for axis in axes
        )
        verdict = verdicts.get((each.variant, each.cell), "")
        agree = agreement(their, verdict, experiment.equivalence)
        made.append(Beside(looks[each.variant], place, each, ours, their, our, agree))
    return made
