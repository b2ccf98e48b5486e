"""What changes in training: learning curves, and what was watched beside the score."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from normkit.diagnosis.disturbance import DELTAS
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
    thinned,
)
from normkit.lab.report.scores import Scoreboard, Scores, average, deviation
from normkit.lab.report.words import Metric, cell_words
from normkit.lab.results import Epoch, Result
from normkit.lab.train.corruption import CORRUPTIONS
from normkit.reporting.text import is_finite, listed

EpochValue = Callable[[Epoch], float | None]
POINTS = 14_000  # of all curves of a page: it has to stay small
FEWEST, MOST = 8, 200  # of one curve
FEW_EPOCHS = 6  # up to which each has its tick
FAR = 2  # times the usual height of a band, from which on one is cut
LOST_SHOWN = 3  # runs of a variant that diverged or collapsed, and are drawn
TICKS = 8  # at most, on an axis of whole numbers
DEPTH = "norm, in the order of the forward pass"


class Quantity(NamedTuple):
    """What a view of the learning curves shows."""

    title: str
    of: EpochValue
    logarithmic: bool = False
    timed: bool = False  # over seconds instead of epochs


class WatchedMeasure(NamedTuple):
    """How a measure is shown. The entries of a list are layers, unless ``over`` says otherwise."""

    title: str
    about: str
    entries: str = DEPTH
    over: tuple[float, ...] = ()


MEASURES = {
    "condensation": WatchedMeasure(
        "Feature condensation",
        "Mean cosine between the samples of a fixed batch, before the first norm. Above 0.3 "
        "features are called condensed (UBN).",
    ),
    "esm_mean": WatchedMeasure(
        "Estimation shift of the means",
        "Distance between running means and the means of the test data (estimation shift).",
    ),
    "esm_std": WatchedMeasure(
        "Estimation shift of the deviations",
        "Distance between running deviations and those of the test data (estimation shift).",
    ),
    "stat_diff": WatchedMeasure(
        "Difference of channels",
        "Spread of the channels' means over their mean deviation, in a group (WS and BCN).",
    ),
    "gradient_factor": WatchedMeasure(
        "Gradient factor",
        "|γ| / √(variance + eps): what a norm multiplies gradients with (revisiting BN).",
    ),
    "disturbance": WatchedMeasure(
        "Accuracy with disturbed statistics",
        "The running statistics of the first norms of six blocks were made wrong at random "
        "(estimation shift).",
        "largest relative error",
        (0.0, *DELTAS),
    ),
    **{
        name: WatchedMeasure(
            f"Accuracy on damaged images{how}",
            "On the test images, then on damaged ones: " + ", ".join(CORRUPTIONS) + ".",
            "kind of damage",
            tuple(float(number) for number in range(1 + len(CORRUPTIONS))),
        )
        for name, how in (("corruption", ""), ("corruption_adapted", ", statistics adapted"))
    },
    "gate_saturation": WatchedMeasure(
        "Saturated gates", "Share of gates below 0.05 or above 0.95."
    ),
    "frozen": WatchedMeasure(
        "Frozen norms", "1 for each ubn that is a fixed map at present, 0 for others."
    ),
    **{
        f"ws_gradients_{part}": WatchedMeasure(
            f"Gradient that weight standardization {does}",
            "Of each standardized weight, in the order of the forward pass (WS and BCN).",
            "weight",
        )
        for part, does in (
            ("a", "removes by dividing"),
            ("b", "removes by centring"),
            ("c", "leaves"),
        )
    },
}


def learning_curves(board: Scoreboard) -> Figure:
    """The mean over seeds, with a band of one standard deviation."""
    shown = quantities(board.metric)
    most = points_each(len(shown) * len(list(board)))
    views = tuple(
        View(each.title, tuple(_panel(board, cell, each, most) for cell in board.cells))
        for each in shown
    )
    about = "Mean over the seeds that finished; the band is one standard deviation over seeds."
    if board.counts["diverged"] or board.counts["collapsed"]:
        words = " or ".join(word for word in ("diverged", "collapsed") if board.counts[word])
        about += f" Thin lines that end in a cross are runs that {words}, at most three a variant."
    if any("range" in panel.layout["yaxis"] for view in views for panel in view.panels):
        about += " The vertical axis fits the last three quarters of the training"
        about += " of the runs that survived" * bool(board.counts["lost"])
        about += "; a double click shows everything."
    return Figure("curves", "Learning curves", about, views)


def quantities(metric: Metric) -> list[Quantity]:
    """Scores and losses, the score first; what was not measured is left out later."""

    def score_on(part: str) -> EpochValue:
        def score(epoch: Epoch) -> float | None:
            value = epoch.value(metric.name, part)
            return None if value is None else metric.scaled(value)

        return score

    title = metric.title
    shown = [
        Quantity(title, score_on("test")),
        Quantity(f"{title}, over time", score_on("test"), timed=True),
        Quantity(title.replace("Test", "Validation"), score_on("validation")),
    ]
    if metric.percent:
        shown.append(Quantity(title.replace("Test", "Training"), score_on("train")))
        shown.append(Quantity("Test loss", lambda epoch: epoch.test_loss, logarithmic=True))
    shown.append(Quantity("Training loss", lambda epoch: epoch.train_loss, logarithmic=True))
    return shown


def points_each(count: int) -> int:
    """How many points a curve may have if there are so many of them."""
    return min(max(POINTS // max(count, 1), FEWEST), MOST)


def _panel(board: Scoreboard, cell: Cell, quantity: Quantity, most: int) -> Panel:
    marks: list[Mark] = []
    for scores in board.in_cell(cell):
        style = board.styles[scores.variant.name]
        marks += _curve_marks(scores, style, quantity.of, most, timed=quantity.timed)
    y: dict[str, Any] = axis(quantity.title.removesuffix(", over time"))
    if quantity.logarithmic:
        y["type"] = "log"
    fit = _fit(marks, quantity.logarithmic)
    if fit:
        y["range"] = fit["range"]
        if quantity.title.partition(",")[0].endswith("(%)"):
            y["range"] = [max(fit["range"][0], -1.0), min(fit["range"][1], 101.0)]
    x = axis("seconds of training") if quantity.timed else _epochs_axis(marks)
    layout = {
        "xaxis": {**x, "rangemode": "tozero"},
        "yaxis": y,
        "height": HEIGHT,
        "hovermode": "closest" if quantity.timed else "x unified",
        **({"begin": fit["begin"]} if fit else {}),
    }
    return Panel(cell_words(cell), tuple(marks), layout, "" if quantity.logarithmic else ".2f")


def _epochs_axis(marks: Sequence[Mark]) -> dict[str, Any]:
    """Epochs are whole numbers, also where there are but two of them."""
    last = max((max(each["x"], default=0) for each in marks), default=0)
    return axis("epoch", **({"dtick": 1} if last <= FEW_EPOCHS else {}))


def _curve_marks(
    scores: Scores, style: VariantStyle, of: EpochValue, most: int, *, timed: bool = False
) -> list[Mark]:
    """The mean with its band, and each run that diverged or collapsed."""
    lost = [scores.results[seed] for seed in scores.ended[:LOST_SHOWN]]
    curves = [("line", scores.done), *(("ended", [each]) for each in lost)]
    marks = []
    for kind, results in curves:
        points = _over_seeds(results, of, most)
        if points:
            x = [point.seconds if timed else point.epoch for point in points]
            std = [point.std for point in points]  # of a single run there is none
            marks.append(mark(kind, style, x, [point.mean for point in points], std))
    return marks


class CurvePoint(NamedTuple):
    epoch: int
    seconds: float
    mean: float
    std: float | None


def _over_seeds(results: Sequence[Result], of: EpochValue, most: int) -> list[CurvePoint]:
    """Some of the epochs that all of the runs have: else the mean would jump where one ends."""
    if not results:
        return []
    by_epoch = [{epoch.epoch: epoch for epoch in result.epochs} for result in results]
    shared = [n for n in by_epoch[0] if all(n in each for each in by_epoch)]
    measured = [n for n in sorted(shared) if of(by_epoch[0][n]) is not None]
    points = []
    for place in thinned(len(measured), most):
        epochs = [each[measured[place]] for each in by_epoch]
        values = [value for epoch in epochs if is_finite(value := of(epoch))]
        if len(values) == len(epochs):
            seconds = sum(epoch.seconds for epoch in epochs) / len(epochs)
            mean = sum(values) / len(values)
            points.append(CurvePoint(measured[place], seconds, mean, deviation(values)))
    return points


def _fit(marks: Sequence[Mark], logarithmic: bool, *, whole: bool = False) -> dict[str, Any]:
    """Bounds of the y axis, and where on x the values begin that fit it; {}: plotly fits it better.

    The first quarter would make the rest look flat, unless the ``whole`` curve is the point; and so
    would a run that diverged or collapsed, or the band of a seed that is far from all others.
    charts.js does the same for the variants that are shown.
    """
    lines = [each for each in marks if each["k"] == "line"]
    lost = bool(lines) and len(lines) < len(marks)
    long = not (logarithmic or whole) and any(len(each["x"]) >= 8 for each in marks)
    begin = max(max(each["x"]) for each in marks) / 4 if long else 0
    reaches = [_reach(each, begin, logarithmic) for each in lines or marks]
    reaches = [each for each in reaches if each.means]
    if not reaches:
        return {}
    bounds, whole_bands = bounds_of(reaches), bounds_of(reaches, far=math.inf)
    if not (lost or long or bounds != whole_bands):
        return {}
    low, high = bounds
    room = 0.05 * (high - low) or 1.0
    return {"range": [round(low - room, 4), round(high + room, 4)], "begin": begin}


class Reach(NamedTuple):
    """Where a curve is, and where its band is."""

    means: list[float]
    lows: list[float]
    highs: list[float]


def _reach(line: Mark, begin: float, logarithmic: bool) -> Reach:
    """From a place on; of an axis of powers, the exponents."""
    spread = line.get("s") or [0.0] * len(line["x"])
    points = [
        (y, y - std, y + std)
        for x, y, std in zip(line["x"], line["y"], spread, strict=True)
        if x >= begin
    ]
    columns = zip(*points, strict=True) if points else ([], [], [])
    if not logarithmic:
        return Reach(*map(list, columns))
    return Reach(*([math.log10(v) for v in column if v > 0] for column in columns))


def bounds_of(reaches: Sequence[Reach], far: float = FAR) -> tuple[float, float]:
    """Room for all curves, and for their bands unless one of these is far higher than usual.

    >>> usual = Reach([90.0, 95.0], [89.0, 94.0], [91.0, 96.0])
    >>> bounds_of([usual, usual, Reach([80.0, 84.0], [50.0, 60.0], [110.0, 108.0])])
    (72.5, 102.5)
    """
    low = min(min(each.means) for each in reaches)
    high = max(max(each.means) for each in reaches)
    heights = [max(each.highs, default=0.0) - max(each.means) for each in reaches]
    room = max((high - low) / 2, far * statistics.median(heights))
    bands = [value for each in reaches for value in (*each.lows, *each.highs)]
    return max(min([low, *bands]), low - room), min(max([high, *bands]), high + room)


def watched_measures(board: Scoreboard) -> list[Figure]:
    """A figure for each measure: over the epochs, and over the depth of the network."""
    names: dict[str, bool] = {}  # and whether it is a list: one value a layer
    for scores in board:
        for result in list(scores.results.values())[:1]:  # the seeds of a variant have the same
            for epoch in result.epochs:
                for name, value in epoch.measures.items():
                    names[name] = names.get(name, False) or isinstance(value, (list, tuple))
    most = points_each(4 * len(names) * len(list(board)))
    return [_watched(board, name, deep, most) for name, deep in names.items()]


def _watched(board: Scoreboard, name: str, deep: bool, most: int) -> Figure:
    words = name.replace("_", " ").replace(".", " ")
    other = WatchedMeasure(words[:1].upper() + words[1:], "As measured in training.")
    shown = MEASURES.get(name, other)

    def value(epoch: Epoch) -> float | None:
        return mean_number(epoch.measures.get(name))

    def panel(cell: Cell, marks: Sequence[Mark], x: dict[str, Any]) -> Panel:
        y = axis(shown.title, rangemode="tozero")
        layout = {"xaxis": x, "yaxis": y, "height": HEIGHT, "hovermode": "x unified"}
        if marks and (fit := _fit(marks, False, whole=True)):
            y["range"] = [min(0.0, fit["range"][0]), fit["range"][1]]
            layout["begin"] = 0
        return Panel(cell_words(cell), tuple(marks), layout)

    views = []
    if deep:
        panels = []
        for cell in board.cells:
            marks = _depth_marks(board, name, shown, cell)
            longest = max((max(each["x"]) for each in marks), default=1)
            ticks = {} if shown.over else {"tick0": 1, "dtick": math.ceil(longest / TICKS)}
            panels.append(panel(cell, marks, axis(shown.entries, **ticks)))
        views.append(View("At the last measurement", tuple(panels)))
    if not shown.over:
        panels = []
        for cell in board.cells:
            marks = [
                each
                for scores in board.in_cell(cell)
                for each in _curve_marks(scores, board.styles[scores.variant.name], value, most)
            ]
            panels.append(panel(cell, marks, _epochs_axis(marks)))
        views.append(View("Over the epochs" + (", mean of all" if deep else ""), tuple(panels)))
    # who is not in the chart: per-sample norms, for one, have no running statistics to be off
    without = {
        scores.variant.name
        for scores in board
        if scores.done
        and all(value(epoch) is None for result in scores.done for epoch in result.epochs)
    }
    about = f"{shown.about} Mean and deviation over seeds."
    if without:
        names = [each for each in board.names() if each in without]
        about += f" Nothing to measure: {listed(names)}."
    return Figure(f"watched-{name}", shown.title, about, tuple(views))


def mean_number(value: Any) -> float | None:
    """A measurement as one number: the mean over the layers, where there are several."""
    if isinstance(value, (list, tuple)):
        return average([mean_number(each) for each in value])
    return float(value) if isinstance(value, (int, float)) and is_finite(value) else None


def _depth_marks(board: Scoreboard, name: str, shown: WatchedMeasure, cell: Cell) -> list[Mark]:
    """Over the depth of the network, or whatever the entries of a list are."""
    marks: list[Mark] = []
    for scores in board.in_cell(cell):
        columns = list(zip(*_last_profiles(scores, name), strict=True))
        fits = len(shown.over) == len(columns)
        x = shown.over if fits else range(1, len(columns) + 1)
        points = [
            (at, average(column), deviation([v for v in column if v is not None]))
            for at, column in zip(x, columns, strict=True)
            if any(value is not None for value in column)  # a norm without statistics has none
        ]
        if points:
            places, mean, std = zip(*points, strict=True)
            marks.append(mark("line", board.styles[scores.variant.name], places, mean, std))
    return marks


def _last_profiles(scores: Scores, name: str) -> list[list[float | None]]:
    """For each seed, the last measurement of all layers."""
    profiles = []
    for result in scores.done:
        measured = (epoch.measures.get(name) for epoch in result.epochs)
        lists = [each for each in measured if isinstance(each, (list, tuple)) and each]
        if lists:
            profiles.append([mean_number(value) for value in lists[-1]])
    return [each for each in profiles if len(each) == len(profiles[0])]
