"""Learning curves: the mean over seeds, with a band of one standard deviation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from normkit.lab.experiment import Cell
from normkit.lab.report.figures import HEIGHT, Figure, Mark, Panel, View, axis, mark, thinned
from normkit.lab.report.metrics import Metric
from normkit.lab.report.scores import Board, Scores, deviation
from normkit.lab.report.styling import Look
from normkit.lab.report.words import cell_words, known
from normkit.lab.results import DIVERGED, Epoch, Result

Measure = Callable[[Epoch], float | None]
POINTS = 20_000  # of all curves of a page: it has to stay small
FEWEST, MOST = 15, 200  # of one curve
ENDED = 3  # runs of a variant that diverged, and are drawn


class Quantity(NamedTuple):
    """What a view of the figure shows."""

    title: str
    of: Measure
    logarithmic: bool = False
    timed: bool = False  # over seconds instead of epochs


def curves(board: Board, looks: Mapping[str, Look]) -> Figure:
    quantities = _quantities(Metric(board.experiment.metric))
    cells = board.experiment.cells()
    most = points_each(len(quantities) * len(list(board)))
    views = [
        View(each.title, tuple(_panel(board, cell, looks, each, most) for cell in cells))
        for each in quantities
    ]
    return Figure(
        "curves",
        "Learning curves",
        "Mean over the seeds that finished; the band is one standard deviation over seeds. "
        "Thin lines that end in a cross are runs that diverged, three of a variant at most. The "
        "axis begins where a quarter of the training is done; a double click shows everything.",
        tuple(views),
    )


def _quantities(metric: Metric) -> list[Quantity]:
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


def points_each(count: int) -> int:
    """How many points a curve may have if there are so many of them."""
    return min(max(POINTS // max(count, 1), FEWEST), MOST)


def score_of(part: str, metric: str) -> Measure:
    """accuracy, error (both in percent) or loss, on the training, validation or test set."""
    if metric == "loss":
        return lambda epoch: getattr(epoch, f"{part}_loss")

    def percent(epoch: Epoch) -> float | None:
        accuracy = getattr(epoch, f"{part}_accuracy")
        if accuracy is None:
            return None
        return 100 * (1 - accuracy if metric == "error" else accuracy)

    return percent


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
    layout = {
        "xaxis": axis("seconds of training" if quantity.timed else "epoch", rangemode="tozero"),
        "yaxis": y,
        "height": HEIGHT,
        "hovermode": "closest" if quantity.timed else "x unified",
    }
    return Panel(cell_words(cell), tuple(marks), layout, "" if quantity.logarithmic else ".2f")


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
