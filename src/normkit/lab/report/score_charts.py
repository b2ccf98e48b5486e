"""Charts of final scores: paired differences, scores along an axis, score against time."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from normkit.lab.experiment import Cell
from normkit.lab.report.figures import (
    HEIGHT,
    Figure,
    Mark,
    Panel,
    VariantStyle,
    View,
    axis,
    mark,
    plotly_text,
    short_number,
    short_numbers,
)
from normkit.lab.report.scores import Arrangement, Scoreboard, arrange, average, is_numeric, ranked
from normkit.lab.report.words import axis_words, cell_words, value_words
from normkit.lab.results import Comparison
from normkit.reporting.charts import forest_scale
from normkit.reporting.text import is_finite

ROW, FRAME = 34, 96  # pixels for each variant, and for what is around them
DETAILED = 3000  # seeds of all variants, up to which each dot says both of its scores
WIDE = 8  # largest over smallest value, from which on an axis is logarithmic


def paired_differences(board: Scoreboard, comparisons: Sequence[Comparison]) -> Figure:
    """Differences from the baseline, seed by seed, with their intervals."""
    metric = board.metric
    panels = []
    detailed = sum(c.pairs for c in comparisons) <= DETAILED
    for cell in board.cells:
        # plotly counts upwards, readers downwards
        rows = [c for c in reversed(ranked(comparisons)) if c.pairs and c.cell == cell]
        marks = [_pairs(board, c, row, detailed) for row, c in enumerate(rows)]
        layout = _pairs_layout(marks, rows, board)
        panels.append(Panel(cell_words(cell), tuple(marks), layout, f"+.{metric.digits}f"))
    unit = "percentage points" if metric.percent else metric.words
    return Figure(
        "paired",
        f"Difference from {board.experiment.baseline}, seed by seed",
        f"In {unit}; right of zero is better. Each dot is a seed: the same data order and, where "
        "layers are shared, the same first weights for both. The bar is the 95 % interval of the "
        "mean difference; differences in the shaded strip do not matter here. What is far from all "
        "others lies outside of the axis; a double click shows it.",
        (View("Paired differences", tuple(panels)),),
    )


def _pairs(board: Scoreboard, c: Comparison, row: int, detailed: bool) -> Mark:
    metric = board.metric
    scores, base = board.get(c.variant, c.cell), board.baseline(c.cell)
    differences = {} if scores is None else board.differences(scores)
    both = [
        [seed, *short_numbers([metric.scaled(s.by_seed[seed]) for s in (scores, base)])]
        for seed in differences
        if detailed and scores is not None and base is not None
    ]
    bounded = is_finite(c.low) and is_finite(c.high)
    more: dict[str, Any] = {"both": both} if detailed else {}
    return mark(
        "pairs",
        board.styles[c.variant],
        [metric.scaled(value) for value in differences.values()],
        [],  # charts.js spreads the dots over the row
        row=row,
        **more,
        mean=short_number(metric.scaled(c.difference)),
        ends=short_numbers([metric.scaled(c.low), metric.scaled(c.high)] if bounded else []),
    )


def _pairs_layout(
    marks: Sequence[Mark], rows: Sequence[Comparison], board: Scoreboard
) -> dict[str, Any]:
    metric = board.metric
    names = [c.variant for c in rows]
    strip = metric.scaled(board.experiment.equivalence)
    # one seed that is far out, or one interval of two seeds, would make dots of all others
    scale = forest_scale([*each["x"], *each["ends"]] for each in marks)
    return {
        "xaxis": axis(
            f"{'points' if metric.percent else metric.name}, better →",
            zeroline=True,
            range=short_numbers([scale.low, scale.high]),
        ),
        "yaxis": {
            "tickvals": list(range(len(names))),
            "ticktext": [plotly_text(name) for name in names],
            "range": [-0.6, len(names) - 0.4],
            "showgrid": False,
            "fixedrange": True,
        },
        "height": FRAME + ROW * max(len(names), 2),
        "hovermode": "closest",
        "strip": [-strip, strip],
    }


def scores_over_axes(board: Scoreboard) -> list[Figure]:
    """A figure for each axis of numbers; where there is none, for the axis of most names."""
    axes = {path: values for path, values in board.axes.items() if len(values) > 1}
    numeric = [path for path, values in axes.items() if is_numeric(values)]
    chosen = numeric or sorted(axes, key=lambda path: -len(axes[path]))[:1]
    metric = board.metric
    figures = []
    for path in chosen:
        table = arrange(board.cells, columns=path)
        views = [View("Ours", _along(board, table, published=False))]
        about = "Mean over seeds; the bars are one standard deviation."
        if board.experiment.published:
            about += " Dotted and hollow: published."
            views.append(View("Ours and published", _along(board, table, published=True)))
        title = f"{metric.title.removesuffix(' (%)')} over {axis_words(path)}"
        figures.append(Figure(f"over-{path}", title, about, tuple(views)))
    return figures


def _along(board: Scoreboard, table: Arrangement, *, published: bool) -> tuple[Panel, ...]:
    metric = board.metric
    layout = {
        "xaxis": _grid_axis(table.axis or "", table.columns),
        "yaxis": axis(metric.title),
        "height": HEIGHT + 40,
        "hovermode": "closest",
    }
    panels = []
    for group in table.groups:
        marks: list[Mark] = []
        for style in board.styles.values():
            marks += _ours(board, style, table, group)
            if published:
                marks += _published(board, style, table, group)
        panels.append(Panel(cell_words(group), tuple(marks), layout, f".{metric.digits}f"))
    return tuple(panels)


def _grid_axis(path: str, columns: Sequence[Any]) -> dict[str, Any]:
    if not is_numeric(columns):
        return axis(axis_words(path), type="category")
    wide = min(columns) > 0 and max(columns) / min(columns) >= WIDE
    ticks = {"tickvals": list(columns), "ticktext": [value_words(v) for v in columns]}
    return axis(axis_words(path), type="log" if wide else "linear", **ticks)


def _x(column: Any) -> Any:
    return column if is_numeric([column]) else value_words(column)


def _ours(board: Scoreboard, style: VariantStyle, table: Arrangement, group: Cell) -> list[Mark]:
    x, y, std, seeds = [], [], [], []
    for column in table.columns:
        cell = table.cell(group, column)
        scores = None if cell is None else board.get(style.name, cell)
        if scores is not None and scores.mean is not None:
            x.append(_x(column))
            y.append(board.metric.scaled(scores.mean))
            std.append(board.metric.scaled(scores.std or 0.0))
            seeds.append(len(scores.by_seed))
    return [mark("points", style, x, y, std, n=seeds)] if x else []


def _published(
    board: Scoreboard, style: VariantStyle, table: Arrangement, group: Cell
) -> list[Mark]:
    values = {(each.variant, each.cell): each.value for each in board.experiment.published}
    pairs = [
        (_x(column), board.metric.scaled(values[style.name, cell]))
        for column in table.columns
        if (cell := table.cell(group, column)) is not None and (style.name, cell) in values
    ]
    return [mark("published", style, *map(list, zip(*pairs, strict=True)))] if pairs else []


def _with_room(marks: Sequence[Mark], layout: dict[str, Any]) -> dict[str, Any]:
    """The axis fits all points, and the bars unless one of them is far longer than the others."""
    bars = [each.get("s", [0.0])[0] for each in marks]
    if len(marks) < 3:
        return layout
    means = [each["y"][0] for each in marks]
    room = max((max(means) - min(means)) / 2, 2 * statistics.median(bars))
    if max(bars) <= 2 * room:
        return layout
    bounds = short_numbers([min(means) - 1.1 * room, max(means) + 1.1 * room])
    return {**layout, "yaxis": {**layout["yaxis"], "range": bounds}}


def time_trade_off(board: Scoreboard) -> Figure:
    """What a variant's score costs in training time."""
    metric = board.metric
    layout = {
        "xaxis": axis("seconds of training", rangemode="tozero"),
        "yaxis": axis(metric.title),
        "height": HEIGHT,
        "hovermode": "closest",
    }
    panels = []
    for cell in board.cells:
        marks: list[Mark] = []
        for scores in board.in_cell(cell):
            seconds = average([result.seconds for result in scores.done])
            if scores.mean is not None and seconds:
                mean, std = [metric.scaled(scores.mean)], [metric.scaled(scores.std or 0.0)]
                style, seeds = board.styles[scores.variant.name], [len(scores.by_seed)]
                marks.append(mark("dot", style, [seconds], mean, std, n=seeds))
        panels.append(
            Panel(cell_words(cell), tuple(marks), _with_room(marks, layout), f".{metric.digits}f")
        )
    better = "Up" if board.experiment.higher_is_better else "Down"
    return Figure(
        "trade",
        f"{metric.title.removesuffix(' (%)')} against training time",
        f"Mean over seeds; the bars are one standard deviation. {better} and to the left is "
        "better.",
        (View(metric.title, tuple(panels)),),
    )
