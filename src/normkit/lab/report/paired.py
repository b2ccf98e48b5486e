"""Differences from the baseline, seed by seed, with their intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from normkit.lab.experiment import Cell
from normkit.lab.report.figures import Figure, Mark, Panel, View, axis, mark, number, numbers, said
from normkit.lab.report.metrics import Metric
from normkit.lab.report.ranking import ranked
from normkit.lab.report.scores import Board
from normkit.lab.report.styling import Look
from normkit.lab.report.words import cell_words, known
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
