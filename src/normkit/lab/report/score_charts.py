"""Charts of final scores: paired differences, scores along an axis, score against time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from normkit.lab.experiment import Cell
from normkit.lab.report.figures import (
    HEIGHT,
    Figure,
    Look,
    Mark,
    Panel,
    View,
    axis,
    mark,
    number,
    numbers,
    said,
)
from normkit.lab.report.scores import (
    Arrangement,
    Board,
    arrange,
    average,
    axes_of,
    is_numeric,
    ranked,
)
from normkit.lab.report.words import Metric, axis_words, cell_words, known, value_words
from normkit.lab.results import Comparison

ROW, FRAME = 34, 96  # pixels for each variant, and for what is around them
SPREAD = 0.26  # how far the dots of the first and the last seed lie from the middle of a row


def paired(board: Board, comparisons: Sequence[Comparison], looks: Mapping[str, Look]) -> Figure:
    metric = Metric(board.experiment.metric)
    panels = tuple(
        _panel(board, [c for c in comparisons if c.cell == cell], looks, cell, metric)
        for cell in board.experiment.cells()
    )
    unit = "percentage points" if metric.percent else metric.words
    return Figure(
        "paired",
        f"Difference from {board.experiment.baseline}, seed by seed",
        f"In {unit}; right of zero is better. Each dot is a seed: the same data order and, where "
        "layers are shared, the same first weights for both. The bar is the 95 % interval of the "
        "mean difference; differences in the shaded strip do not matter here.",
        (View("Paired differences", panels),),
    )


def _panel(
    board: Board,
    comparisons: Sequence[Comparison],
    looks: Mapping[str, Look],
    cell: Cell,
    metric: Metric,
) -> Panel:
    # plotly counts upwards, readers downwards
    order = [c for c in reversed(ranked(comparisons)) if c.pairs]
    marks = [_row(board, c, looks[c.variant], metric, place) for place, c in enumerate(order)]
    return Panel(
        cell_words(cell),
        tuple(marks),
        _layout(marks, [c.variant for c in order], metric, board.experiment.equivalence),
        f"+.{metric.digits}f",
    )


def _row(board: Board, c: Comparison, look: Look, metric: Metric, place: int) -> Mark:
    scores, base = board.get(c.variant, c.cell), board.baseline(c.cell)
    differences = {} if scores is None else board.differences(scores)
    count = len(differences)
    step = 2 * SPREAD / max(count - 1, 1)
    rows = [round(place + (SPREAD - i * step if count > 1 else 0.0), 3) for i in range(count)]
    both = [
        [seed, *numbers([metric.scaled(scores.by_seed[seed]), metric.scaled(base.by_seed[seed])])]
        for seed in differences
        if scores is not None and base is not None
    ]
    bounded = known(c.low) and known(c.high)
    ends = [metric.scaled(c.low), metric.scaled(c.high)] if bounded else []
    return mark(
        "pairs",
        look,
        [metric.scaled(value) for value in differences.values()],
        rows,
        row=place,
        both=both,
        mean=number(metric.scaled(c.difference)),
        ends=numbers(ends),
    )


def _layout(
    marks: Sequence[Mark], names: Sequence[str], metric: Metric, margin: float
) -> dict[str, Any]:
    strip = metric.scaled(margin)
    found = [0.0, *(x for each in marks for x in [*each["x"], *each["ends"]] if x is not None)]
    room = 0.06 * (max(found) - min(found)) or strip or 1.0
    return {
        "xaxis": axis(
            f"{'points' if metric.percent else metric.name}, better →",
            zeroline=True,
            range=numbers([min(found) - room, max(found) + room]),
        ),
        "yaxis": {
            "tickvals": list(range(len(names))),
            "ticktext": [said(name) for name in names],
            "range": [-0.6, len(names) - 0.4],
            "showgrid": False,
            "fixedrange": True,
        },
        "height": FRAME + ROW * max(len(names), 2),
        "hovermode": "closest",
        "strip": [-strip, strip],
    }


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


def trade(board: Board, looks: Mapping[str, Look]) -> Figure:
    metric = Metric(board.experiment.metric)
    panels = tuple(_trade_panel(board, looks, cell, metric) for cell in board.experiment.cells())
    better = "Up" if board.experiment.higher_is_better else "Down"
    return Figure(
        "trade",
        f"{metric.title.removesuffix(' (%)')} against training time",
        f"Mean over seeds; the bars are one standard deviation. {better} and to the left is "
        "better.",
        (View(metric.title, panels),),
    )


def _trade_panel(board: Board, looks: Mapping[str, Look], cell: Cell, metric: Metric) -> Panel:
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
