"""What was watched beside the score: over the epochs, and over the depth of the network."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from normkit.lab.experiment import Cell
from normkit.lab.report.curves import epochs_axis, marks_of, points_each
from normkit.lab.report.figures import HEIGHT, Figure, Mark, Panel, View, axis, mark
from normkit.lab.report.measures import MEASURES, Measure
from normkit.lab.report.scores import Board, Scores, average, deviation
from normkit.lab.report.styling import Look
from normkit.lab.report.words import cell_words, known, listed
from normkit.lab.results import Epoch

TICKS = 8  # at most, on an axis of whole numbers


def watched(board: Board, looks: Mapping[str, Look]) -> list[Figure]:
    """A figure for each measure that was taken."""
    names: dict[str, bool] = {}  # and whether it is a list: one value a layer
    for scores in board:
        for result in list(scores.results.values())[:1]:  # the seeds of a variant have the same
            for epoch in result.epochs:
                for name, value in epoch.measures.items():
                    names[name] = names.get(name, False) or isinstance(value, (list, tuple))
    most = points_each(4 * len(names) * len(list(board)))
    return [_figure(board, looks, name, deep, most) for name, deep in names.items()]


def _figure(board: Board, looks: Mapping[str, Look], name: str, deep: bool, most: int) -> Figure:
    words = name.replace("_", " ").replace(".", " ")
    usual = Measure(words[:1].upper() + words[1:], "As measured in training.")
    shown = MEASURES.get(name, usual)
    cells = board.experiment.cells()
    views = []
    if deep:
        panels = tuple(_last(board, looks, name, shown, cell) for cell in cells)
        views.append(View("At the last measurement", panels))
    if not shown.over:
        panels = tuple(_epochs(board, looks, name, shown.title, cell, most) for cell in cells)
        views.append(View("Over the epochs" + (", mean of all" if deep else ""), panels))
    about = f"{shown.about} Mean and deviation over seeds.{_without(board, name)}"
    return Figure(f"watched-{name}", shown.title, about, tuple(views))


def _without(board: Board, name: str) -> str:
    """Who is not in the chart: per-sample norms, for one, have no running statistics to be off."""
    lacking = {
        scores.variant.name
        for scores in board
        if scores.done
        and not any(
            number_of(epoch.measures.get(name)) is not None
            for result in scores.done
            for epoch in result.epochs
        )
    }
    names = [each for each in board.names() if each in lacking]
    return f" Nothing to measure: {listed(names)}." if names else ""


def number_of(value: Any) -> float | None:
    """A measurement as one number: the mean over the layers, where there are several."""
    if isinstance(value, (list, tuple)):
        return average([number_of(each) for each in value])
    plain = isinstance(value, (int, float)) and known(value)
    return float(value) if plain else None


def _epochs(
    board: Board, looks: Mapping[str, Look], name: str, title: str, cell: Cell, most: int
) -> Panel:
    def of(epoch: Epoch) -> float | None:
        return number_of(epoch.measures.get(name))

    marks: list[Mark] = []
    for scores in board.in_cell(cell):
        marks += marks_of(scores, looks[scores.variant.name], of, most)
    return Panel(cell_words(cell), tuple(marks), _layout(epochs_axis(marks), title))


def _last(board: Board, looks: Mapping[str, Look], name: str, shown: Measure, cell: Cell) -> Panel:
    """Over the depth of the network, or whatever the entries of a list are."""
    marks: list[Mark] = []
    for scores in board.in_cell(cell):
        columns = list(zip(*_profiles(scores, name), strict=True))
        fits = len(shown.over) == len(columns)
        x = shown.over if fits else range(1, len(columns) + 1)
        points = [
            (at, average(column), deviation([v for v in column if v is not None]))
            for at, column in zip(x, columns, strict=True)
            if any(value is not None for value in column)  # a norm without statistics has none
        ]
        if points:
            places, mean, std = zip(*points, strict=True)
            marks.append(mark("line", looks[scores.variant.name], places, mean, std))
    longest = max((max(each["x"]) for each in marks), default=1)
    ticks = {} if shown.over else {"tick0": 1, "dtick": math.ceil(longest / TICKS)}
    along = axis(shown.entries, **ticks)
    return Panel(cell_words(cell), tuple(marks), _layout(along, shown.title))


def _layout(x: dict[str, Any], y: str) -> dict[str, Any]:
    return {
        "xaxis": x,
        "yaxis": axis(y, rangemode="tozero"),
        "height": HEIGHT,
        "hovermode": "x unified",
    }


def _profiles(scores: Scores, name: str) -> list[list[float | None]]:
    """For each seed, the last measurement of all layers."""
    found = []
    for result in scores.done:
        lists = [e.measures[name] for e in result.epochs if _is_list(e.measures.get(name))]
        if lists:
            found.append([number_of(value) for value in lists[-1]])
    return [each for each in found if len(each) == len(found[0])]


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) > 0
