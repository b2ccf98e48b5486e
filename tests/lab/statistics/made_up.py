"""Experiments with results that nobody trained for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from normkit.lab.experiment import Cell, Experiment, ModelStep, Setting, Variant
from normkit.lab.results import DIVERGED, DONE, Epoch, Result

Scores = Mapping[str, Sequence[float | None]]  # variant -> one a seed; None: diverged


def variant(name: str, cell: Cell = ()) -> Variant:
    where = ".".join(f"{key}={value}" for key, value in cell)
    return Variant(name, Setting(steps=(ModelStep("norm", name, where=where or None),)), cell)


def experiment(
    *names: str, seeds: int, cells: Sequence[Cell] = ((),), **more: object
) -> Experiment:
    variants = tuple(variant(name, cell) for cell in cells for name in names)
    return Experiment(
        name="made_up",
        title="made up",
        variants=variants,
        seeds=tuple(range(1, seeds + 1)),
        **{"baseline": names[0], **more},  # type: ignore[arg-type]
    )


def result(run: str, accuracy: float | None) -> Result:
    """A run of two epochs, of which the second counts; ten classes, 10,000 test samples."""
    if accuracy is None:
        return Result(run, DIVERGED, (), (), seconds=1.0, parameters=10)
    epochs = (
        Epoch(1, test_accuracy=accuracy / 2, test_loss=2 - accuracy, seconds=10.0),
        Epoch(2, test_accuracy=accuracy, test_loss=1 - accuracy, seconds=20.0),
    )
    data = {"classes": 10, "test_samples": 10_000}
    return Result(run, DONE, (2,), epochs, seconds=20.0, parameters=10, **data)  # type: ignore[arg-type]


def results(about: Experiment, scores: Scores, cell: Cell = ()) -> dict[str, Result]:
    """Results for the first seeds of each variant, as many as there are scores."""
    found = {}
    for name, accuracies in scores.items():
        runs = about.variant(name, cell).runs(about.seeds[: len(accuracies)])
        for run, accuracy in zip(runs, accuracies, strict=True):
            found[run.id] = result(run.id, accuracy)
    return found
