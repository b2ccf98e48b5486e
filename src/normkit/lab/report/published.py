"""Numbers that papers print, beside ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from normkit.lab.experiment import Published
from normkit.lab.report.arranging import axes_of
from normkit.lab.report.scores import Board, Scores
from normkit.lab.report.styling import Look
from normkit.lab.report.words import value_words


@dataclass(frozen=True)
class Beside:
    """A published number, ours, and how both differ from the baseline's (positive is better)."""

    look: Look
    place: tuple[tuple[Any, str], ...]
    published: Published
    ours: Scores | None
    their_difference: float | None
    our_difference: float | None

    @property
    def agree(self) -> str:
        """Whether both differences point the same way."""
        if self.their_difference is None or self.our_difference is None:
            return ""
        return "yes" if (self.their_difference > 0) == (self.our_difference > 0) else "no"


def beside(board: Board, looks: Mapping[str, Look]) -> list[Beside]:
    experiment = board.experiment
    axes = list(axes_of(experiment.cells()))
    sign = 1 if experiment.higher_is_better else -1
    values = {(each.variant, each.cell): each.value for each in experiment.published}
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
        made.append(Beside(looks[each.variant], place, each, ours, their, our))
    return made
