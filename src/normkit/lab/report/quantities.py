"""What learning curves show: scores and losses, over epochs or over time."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from normkit.lab.report.metrics import Metric
from normkit.lab.results import Epoch

Measure = Callable[[Epoch], float | None]


class Quantity(NamedTuple):
    """What a view of the figure shows."""

    title: str
    of: Measure
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


def score_of(part: str, metric: str) -> Measure:
    """A metric on the training, validation or test set; in percent, but for the loss."""

    def score(epoch: Epoch) -> float | None:
        value = epoch.value(metric, part)
        return value if value is None or metric == "loss" else 100 * value

    return score
