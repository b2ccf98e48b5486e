"""What a variant's score costs in training time."""

from __future__ import annotations

from collections.abc import Mapping

from normkit.lab.experiment import Cell
from normkit.lab.report.figures import HEIGHT, Figure, Mark, Panel, View, axis, mark
from normkit.lab.report.metrics import Metric
from normkit.lab.report.scores import Board, average
from normkit.lab.report.styling import Look
from normkit.lab.report.words import cell_words


def trade(board: Board, looks: Mapping[str, Look]) -> Figure:
    metric = Metric(board.experiment.metric)
    panels = tuple(_panel(board, looks, cell, metric) for cell in board.experiment.cells())
    better = "Up" if board.experiment.higher_is_better else "Down"
    return Figure(
        "trade",
        f"{metric.title.removesuffix(' (%)')} against training time",
        f"Mean over seeds; the bars are one standard deviation. {better} and to the left is "
        "better.",
        (View(metric.title, panels),),
    )


def _panel(board: Board, looks: Mapping[str, Look], cell: Cell, metric: Metric) -> Panel:
    marks: list[Mark] = []
    for scores in board.in_cell(cell):
        seconds = average([result.seconds for result in scores.done])
        if scores.mean is not None and seconds:
            mean, std = [metric.scaled(scores.mean)], [metric.scaled(scores.std or 0.0)]
            look = looks[scores.variant.name]
            marks.append(mark("dot", look, [seconds], mean, std, n=[len(scores.by_seed)]))
    layout = {
        "xaxis": axis("seconds of training", rangemode="tozero"),
        "yaxis": axis(metric.title),
        "height": HEIGHT,
        "hovermode": "closest",
    }
    return Panel(cell_words(cell), tuple(marks), layout, f".{metric.digits}f")
