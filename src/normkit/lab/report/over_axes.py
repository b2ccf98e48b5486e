"""Scores along an axis of the grid, such as the batch size, with published ones beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from normkit.lab.experiment import Cell
from normkit.lab.report.arranging import Arrangement, arrange, axes_of, is_numeric
from normkit.lab.report.figures import HEIGHT, Figure, Mark, Panel, View, axis, mark
from normkit.lab.report.metrics import Metric
from normkit.lab.report.scores import Board
from normkit.lab.report.styling import Look
from normkit.lab.report.words import axis_words, cell_words, value_words

WIDE = 8  # largest over smallest value, from which on an axis is logarithmic


def over_axes(board: Board, looks: Mapping[str, Look]) -> list[Figure]:
    """A figure for each axis of numbers; where there is none, for the axis of most names."""
    cells = board.experiment.cells()
    axes = {path: values for path, values in axes_of(cells).items() if len(values) > 1}
    numeric = [path for path, values in axes.items() if is_numeric(values)]
    chosen = numeric or sorted(axes, key=lambda path: -len(axes[path]))[:1]
    return [_figure(board, looks, path) for path in chosen]


def _figure(board: Board, looks: Mapping[str, Look], path: str) -> Figure:
    made = arrange(board.experiment.cells(), columns=path)
    metric = Metric(board.experiment.metric)
    views = [View("Ours", _panels(board, looks, made, metric, published=False))]
    about = "Mean over seeds; the bars are one standard deviation."
    if board.experiment.published:
        about += " Dotted and hollow: published."
        both = _panels(board, looks, made, metric, published=True)
        views.append(View("Ours and published", both))
    title = f"{metric.title.removesuffix(' (%)')} over {axis_words(path)}"
    return Figure(f"over-{path}", title, about, tuple(views))


def _panels(
    board: Board,
    looks: Mapping[str, Look],
    made: Arrangement,
    metric: Metric,
    *,
    published: bool,
) -> tuple[Panel, ...]:
    layout = {
        "xaxis": _axis_of(made.axis or "", made.columns),
        "yaxis": axis(metric.title),
        "height": HEIGHT + 40,
        "hovermode": "closest",
    }
    panels = []
    for group in made.groups:
        marks: list[Mark] = []
        for look in looks.values():
            marks += _ours(board, look, made, group, metric)
            if published:
                marks += _theirs(board, look, made, group, metric)
        panels.append(Panel(cell_words(group), tuple(marks), layout, f".{metric.digits}f"))
    return tuple(panels)


def _axis_of(path: str, columns: Sequence[Any]) -> dict[str, Any]:
    if not is_numeric(columns):
        return axis(axis_words(path), type="category")
    spread = min(columns) > 0 and max(columns) / min(columns) >= WIDE
    ticks = {"tickvals": list(columns), "ticktext": [value_words(v) for v in columns]}
    return axis(axis_words(path), type="log" if spread else "linear", **ticks)


def _place(column: Any) -> Any:
    return column if is_numeric([column]) else value_words(column)


def _ours(board: Board, look: Look, made: Arrangement, group: Cell, metric: Metric) -> list[Mark]:
    x, y, std, seeds = [], [], [], []
    for column in made.columns:
        cell = made.cell(group, column)
        scores = None if cell is None else board.get(look.name, cell)
        if scores is not None and scores.mean is not None:
            x.append(_place(column))
            y.append(metric.scaled(scores.mean))
            std.append(metric.scaled(scores.std or 0.0))
            seeds.append(len(scores.by_seed))
    return [mark("points", look, x, y, std, n=seeds)] if x else []


def _theirs(board: Board, look: Look, made: Arrangement, group: Cell, metric: Metric) -> list[Mark]:
    values = {(each.variant, each.cell): each.value for each in board.experiment.published}
    pairs = [
        (_place(column), metric.scaled(values[look.name, cell]))
        for column in made.columns
        if (cell := made.cell(group, column)) is not None and (look.name, cell) in values
    ]
    return [mark("theirs", look, [x for x, _ in pairs], [y for _, y in pairs])] if pairs else []
