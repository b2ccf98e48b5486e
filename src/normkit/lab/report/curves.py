"""What changes in training: learning curves, and what was watched beside the score."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from normkit.diagnosis.disturbance import DELTAS
from normkit.lab.experiment import Cell
from normkit.lab.report.figures import HEIGHT, Figure, Look, Mark, Panel, View, axis, mark, thinned
from normkit.lab.report.scores import Board, Scores, average, deviation
from normkit.lab.report.words import Metric, cell_words, known, listed
from normkit.lab.results import DIVERGED, Epoch, Result

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
    scores: Scores, look: Look, of: EpochValue, most: int, *, timed: bool = False
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


def _over_seeds(results: Sequence[Result], of: EpochValue, most: int) -> list[Row]:
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


EpochValue = Callable[[Epoch], float | None]


class Quantity(NamedTuple):
    """What a view of the figure shows."""

    title: str
    of: EpochValue
    logarithmic: bool = False
    timed: bool = False  # over seconds instead of epochs


def quantities(metric: Metric) -> list[Quantity]:
    """The score first; what was not measured is left out later."""
    title = metric.title
    found = [
        Quantity(title, score_of("test", metric.name)),
        Quantity(f"{title}, over time", score_of("test", metric.name), timed=True),
        Quantity(title.replace("Test", "Validation"), score_of("validation", metric.name)),
    ]
    if metric.percent:
        found.append(Quantity(title.replace("Test", "Training"), score_of("train", metric.name)))
        found.append(Quantity("Test loss", lambda epoch: epoch.test_loss, logarithmic=True))
    found.append(Quantity("Training loss", lambda epoch: epoch.train_loss, logarithmic=True))
    return found


def score_of(part: str, metric: str) -> EpochValue:
    """A metric on the training, validation or test set; in percent, but for the loss."""

    def score(epoch: Epoch) -> float | None:
        value = epoch.value(metric, part)
        return value if value is None or metric == "loss" else 100 * value

    return score


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


DEPTH = "norm, in the order of the forward pass"


class Measure(NamedTuple):
    """How a measure is shown. The entries of a list are layers, unless ``over`` says otherwise."""

    title: str
    about: str
    entries: str = DEPTH
    over: tuple[float, ...] = ()


MEASURES = {
    "condensation": Measure(
        "Feature condensation",
        "Mean cosine between the samples of a fixed batch, before the first norm. Above 0.3 "
        "features are called condensed (UBN).",
    ),
    "esm_mean": Measure(
        "Estimation shift of the means",
        "Distance between running means and the means of the test data (estimation shift).",
    ),
    "esm_std": Measure(
        "Estimation shift of the deviations",
        "Distance between running deviations and those of the test data (estimation shift).",
    ),
    "stat_diff": Measure(
        "Difference of channels",
        "Spread of the channels' means over their mean deviation, in a group (WS and BCN).",
    ),
    "gradient_factor": Measure(
        "Gradient factor",
        "|γ| / √(variance + eps): what a norm multiplies gradients with (revisiting BN).",
    ),
    "disturbance": Measure(
        "Accuracy with disturbed statistics",
        "The running statistics of the first norms of six blocks were made wrong at random "
        "(estimation shift).",
        "largest relative error",
        (0.0, *DELTAS),
    ),
    "gate_saturation": Measure("Saturated gates", "Share of gates below 0.05 or above 0.95."),
    "frozen": Measure(
        "Frozen norms", "1 for each ubn that is a fixed map at present, 0 for others."
    ),
    "ws_gradients_a": Measure(
        "Gradient that weight standardization removes by dividing",
        "Of each standardized weight, in the order of the forward pass (WS and BCN).",
        "weight",
    ),
    "ws_gradients_b": Measure(
        "Gradient that weight standardization removes by centring",
        "Of each standardized weight, in the order of the forward pass (WS and BCN).",
        "weight",
    ),
    "ws_gradients_c": Measure(
        "Gradient that weight standardization leaves",
        "Of each standardized weight, in the order of the forward pass (WS and BCN).",
        "weight",
    ),
}
