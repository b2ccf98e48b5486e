"""Epochs and seconds to the baseline's final score."""

from __future__ import annotations

import pytest

from normkit.lab.results import DONE, Epoch, Result
from normkit.lab.statistics import reach
from normkit.lab.statistics.reaching import usual_reach


def curve(*accuracies: float | None) -> Result:
    """A run that takes 10 seconds an epoch; None: not evaluated."""
    epochs = tuple(
        Epoch(
            number,
            test_accuracy=accuracy,
            test_top5_accuracy=accuracy,
            test_loss=None if accuracy is None else 1 - accuracy,
            seconds=10.0 * number,
        )
        for number, accuracy in enumerate(accuracies, start=1)
    )
    return Result("id", DONE, (len(epochs),), epochs, seconds=99.0, parameters=1)


def test_the_first_epoch_that_is_as_good() -> None:
    run = curve(0.5, 0.75, 0.625, 0.875)
    for metric in ("accuracy", "top5_accuracy"):
        assert reach(run, 0.75, metric) == (2, 20.0)
        assert reach(run, 0.76, metric) == (4, 40.0)
        assert reach(run, 0.9, metric) is None


@pytest.mark.parametrize("metric", ["error", "loss", "top5_error"])
def test_where_less_is_better(metric: str) -> None:
    run = curve(0.5, 0.75, 0.625, 0.875)
    assert reach(run, 0.25, metric) == (2, 20.0)
    assert reach(run, 0.1, metric) is None


def test_what_was_not_evaluated_or_trained_does_not_count() -> None:
    assert reach(curve(None, None, 0.9), 0.5, "accuracy") == (3, 30.0)
    before = Result("id", DONE, (1,), (Epoch(0, test_accuracy=0.9),), seconds=1.0, parameters=1)
    assert reach(before, 0.5, "accuracy") is None


def test_the_median_of_runs_with_targets_of_their_own() -> None:
    runs = [curve(0.5, 0.75, 0.875)] * 3
    assert usual_reach(runs, [0.5, 0.75, 0.9], "accuracy") == (2.0, 20.0)
    assert usual_reach(runs, [0.5, 0.9, 0.9], "accuracy") is None
    assert usual_reach([], [], "accuracy") is None
