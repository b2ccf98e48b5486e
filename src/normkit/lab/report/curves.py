"""Learning curves: the mean over seeds, with a band of one standard deviation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from normkit.lab.experiment import Cell
from normkit.lab.report.figures import HEIGHT, Figure, Mark, Panel, View, axis, mark, thinned
from normkit.lab.report.metrics import Metric
from normkit.lab.report.quantities import Measure, Quantity, quantities
from normkit.lab.report.scores import Board, Scores, deviation
from normkit.lab.report.styling import Look
from normkit.lab.report.words import cell_words, known
from normkit.lab.results import DIVERGED, Result

POINTS = 20_000  # of all curves of a page: it has to stay small
FEWEST, MOST = 15, 200  # of one curve
WHOLE = 6  # epochs up to which each has its tick
ENDED = 3  # runs of a variant that diverged, and are drawn


def curves(board: Board, looks: Mapping[str, Look]) -> Figure:
    shown = quantities(Metric(board.experiment.metric))
    cells = board.experiment.cells()
    most = points_each(len(shown) * len(list(board)))
    views = [
        View(each.title, tuple(_panel(board, cell, looks, each, most) for cell in cells))
        for each in shown
    ]
    return Figure(
        "curves",
        "Learning curves",
        _about(board, views),
        tuple(views),
    )


def _about(board: Board, views: Sequence[View]) -> str:
    said = "Mean over the seeds that finished; the band is one standard deviation over seeds."
    if board.counts["diverged"]:
        said += " Thin lines that end in a cross are runs that diverged, at most three a variant."
    if any("range" in panel.layout["yaxis"] for view in views for panel in view.panels):
        said += (
            " The vertical axis fits the last three quarters of the training; a double click "
            "shows everything."
        )
    return said


def points_each(count: int) -> int:
    """How many points a curve may have if there are so many of them."""
    return min(max(POINTS // max(count, 1), FEWEST), MOST)


def _panel(
    board: Board, cell: Cell, looks: Mapping[str, Look], quantity: Quantity, most: int
) -> Panel:
    marks: list[Mark] = []
    for scores in board.in_cell(cell):
        look = looks[scores.variant.name]
        marks += marks_of(scores, look, quantity.of, most, timed=quantity.timed)
    y: dict[str, Any] = axis(quantity.title.removesuffix(", over time"))
    if quantity.logarithmic:
        y["type"] = "log"
    elif bounds := _later(marks):
        y["range"] = bounds
    x = axis("seconds of training") if quantity.timed else epochs_axis(marks)
    layout = {
        "xaxis": {**x, "rangemode": "tozero"},
        "yaxis": y,
        "height": HEIGHT,
        "hovermode": "closest" if quantity.timed else "x unified",
    }
    return Panel(cell_words(cell), tuple(marks), layout, "" if quantity.logarithmic else ".2f")


def epochs_axis(marks: Sequence[Mark]) -> dict[str, Any]:
    """Epochs are whole numbers, also where there are but two of them."""
    few = max((max(each["x"], default=0) for each in marks), default=0) <= WHOLE
    return axis("epoch", **({"dtick": 1} if few else {}))


def marks_of(
    scores: Scores, look: Look, of: Measure, most: int, *, timed: bool = False
) -> list[Mark]:
    """The mean with its band, and each run that diverged."""
    marks: list[Mark] = []
    rows = _over_seeds(scores.done, of, most)
    if rows:
        x = [row.seconds if timed else row.epoch for row in rows]
        std = [row.std for row in rows]
        marks.append(mark("line", look, x, [row.mean for row in rows], std))
    lost = [result for result in scores.results.values() if result.status == DIVERGED]
    for result in lost[:ENDED]:
        ended = _over_seeds([result], of, most)
        if ended:
            x = [row.seconds if timed else row.epoch for row in ended]
            marks.append(mark("ended", look, x, [row.mean for row in ended]))
    return marks


class Row(NamedTuple):
    epoch: int
    seconds: float
    mean: float
    std: float | None


def _over_seeds(results: Sequence[Result], of: Measure, most: int) -> list[Row]:
    """Some of the epochs that all of the runs have: else the mean would jump where one ends."""
    if not results:
        return []
    by_epoch = [{epoch.epoch: epoch for epoch in result.epochs} for result in results]
    shared = [n for n in by_epoch[0] if all(n in each for each in by_epoch)]
    measured = [n for n in sorted(shared) if of(by_epoch[0][n]) is not None]
    rows = []
    for place in thinned(len(measured), most):
        epochs = [each[measured[place]] for each in by_epoch]
        values = [value for epoch in epochs if (value := of(epoch)) is not None and known(value)]
        if len(values) == len(epochs):
            seconds = sum(epoch.seconds for epoch in epochs) / len(epochs)
            mean = sum(values) / len(values)
            rows.append(Row(measured[place], seconds, mean, deviation(values)))
    return rows


def _later(marks: Sequence[Mark]) -> list[float] | None:
    """Bounds of the y axis without the first quarter, which would make the rest look flat."""
    if not any(len(each["x"]) >= 8 for each in marks):
        return None
    values: list[float] = []
    begin = max(max(each["x"]) for each in marks) / 4
    for each in marks:
        spread = each.get("s") or [0.0] * len(each["x"])
        for x, y, std in zip(each["x"], each["y"], spread, strict=True):
            if x >= begin:
                values += [y - std, y + std]
    low, high = min(values), max(values)
    room = 0.05 * (high - low) or 1.0
    return [round(low - room, 4), round(high + room, 4)]
