"""What each variant costs: time, memory and parameters, beside the baseline's."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from normkit.lab.report.arranging import axes_of
from normkit.lab.report.scores import Board, Scores, average
from normkit.lab.report.styling import Look
from normkit.lab.report.words import NONE, duration, known, size, three, value_words
from normkit.lab.results import Comparison, Result


@dataclass(frozen=True)
class Amount:
    """A number as it is shown, its length as a bar, and how it compares with the baseline's."""

    value: float | None
    text: str
    share: float = 0.0  # of the largest in the table
    ratio: str = ""


@dataclass(frozen=True)
class Cost:
    look: Look
    place: tuple[tuple[Any, str], ...]
    amounts: tuple[Amount, ...]


COLUMNS = (
    ("Time an epoch", lambda result: _epoch_seconds(result), duration),
    ("Images a second", lambda result: result.images_per_second, three),
    ("Peak memory", lambda result: result.peak_memory, size),
    ("Parameters", lambda result: float(result.parameters), lambda value: f"{value or 0:,.0f}"),
)
REACHED = ("Epochs to the baseline's score", "Time to the baseline's score")
NEVER = "not reached"  # by half of the runs


def _epoch_seconds(result: Result) -> float | None:
    trained = [epoch.epoch for epoch in result.epochs if epoch.epoch > 0]
    return result.seconds / max(trained) if trained and known(result.seconds) else None


def heads(rows: Sequence[Cost]) -> list[tuple[int, str]]:
    """Those columns in which anything is known, with their places."""
    names = [*(name for name, _, _ in COLUMNS), *REACHED]
    return [
        (i, name)
        for i, name in enumerate(names)
        if any(r.amounts[i].value is not None for r in rows)
    ]


def costs(board: Board, comparisons: Sequence[Comparison], looks: Mapping[str, Look]) -> list[Cost]:
    """One row for each variant in each cell that has results."""
    axes = list(axes_of(board.experiment.cells()))
    reached = {(c.variant, c.cell): c for c in comparisons}
    measured = [(scores, _measured(scores)) for scores in _in_order(board) if scores.results]
    most = [
        max((values[i] or 0.0 for _, values in measured), default=0.0) for i in range(len(COLUMNS))
    ]
    made = []
    for scores, values in measured:
        cell = scores.variant.cell
        base = board.baseline(cell)
        usual = _measured(base) if base is not None else [None] * len(COLUMNS)
        own = base is scores
        amounts = [
            Amount(value, show(value), _share(value, top), "" if own else _ratio(value, other))
            for value, other, top, (_, _, show) in zip(values, usual, most, COLUMNS, strict=True)
        ]
        amounts += _reached(reached.get((scores.variant.name, cell)), scores if own else None, base)
        place = tuple((dict(cell).get(axis), value_words(dict(cell).get(axis))) for axis in axes)
        made.append(Cost(looks[scores.variant.name], place, tuple(amounts)))
    return made


def _reached(
    found: Comparison | None, own: Scores | None, base: Scores | None
) -> tuple[Amount, Amount]:
    """How soon a variant was as good as the baseline in the end; the baseline's is its end."""
    end = _end(base)
    if own is not None:
        return Amount(end[0], three(end[0])), Amount(end[1], duration(end[1]))
    if found is None or not found.pairs:
        return Amount(None, NONE), Amount(None, NONE)
    epochs, seconds = found.epochs_to_baseline, found.seconds_to_baseline
    if epochs is None:
        return Amount(None, NEVER), Amount(None, NEVER)
    return (
        Amount(epochs, three(epochs), ratio=_ratio(epochs, end[0])),
        Amount(seconds, duration(seconds), ratio=_ratio(seconds, end[1])),
    )


def _end(base: Scores | None) -> tuple[float | None, float | None]:
    """The epoch and the second of training from which the baseline's score is: medians."""
    ends = [
        max(((e.epoch, e.seconds) for e in r.epochs if e.epoch in r.selected), default=None)
        for r in (base.done if base is not None else ())
    ]
    known = [end for end in ends if end is not None]
    if not known:
        return None, None
    return statistics.median(e for e, _ in known), statistics.median(s for _, s in known)


def _in_order(board: Board) -> list[Scores]:
    return [scores for cell in board.experiment.cells() for scores in board.in_cell(cell)]


def _measured(scores: Scores) -> list[float | None]:
    results = scores.done or list(scores.results.values())
    return [average([measure(result) for result in results]) for _, measure, _ in COLUMNS]


def _share(value: float | None, most: float) -> float:
    return 0.0 if value is None or not most else round(value / most, 4)


def _ratio(value: float | None, base: float | None) -> str:
    if value is None or not base:
        return ""
    ratio = value / base
    return "" if abs(ratio - 1) < 0.005 else f"× {ratio:.2f}"
