"""Can a run be a result of what was planned? Asked before it is added to the others."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from normkit.lab.experiment import Run
from normkit.lab.results import DIVERGED, DONE, Result
from normkit.lab.train.evaluate import selected

SHARES = (
    "train_accuracy",
    "test_accuracy",
    "test_top5_accuracy",
    "test_one_class",
    "test_majority",
)
LOSSES = ("train_loss", "test_loss")


def contradictions(result: Result, run: Run) -> Iterator[str]:
    """What came, and what was expected; nothing of a run that can be what was planned."""
    planned = run.setting.train.epochs
    if result.status not in (DONE, DIVERGED):
        yield f"its status is {result.status!r}, expected {DONE!r} or {DIVERGED!r}"
        return
    yield from _where_and_how_long(result)
    numbers = [each.epoch for each in result.epochs]
    first = numbers[0] if numbers else 1
    wanted = [*range(first, planned + 1)]
    if first not in (0, 1) or numbers != wanted[: len(numbers)]:
        yield f"its epochs are {numbers}, expected 1 to {planned} in order"
    elif result.status == DONE and len(numbers) < len(wanted):
        yield f"it has {len([n for n in numbers if n])} of {planned} epochs"
    elif result.selected != (own := _counts(result, run)):
        yield f"the epochs that count are {[*result.selected]}, expected {[*own]}"
    for epoch in result.epochs:
        for name in (*SHARES, *LOSSES):
            value = getattr(epoch, name)
            if value is None:
                if name == "test_accuracy" and epoch.epoch in result.selected:
                    yield f"{name} of epoch {epoch.epoch}, which counts, is not there"
            elif not _is_number(value):
                yield f"{name} of epoch {epoch.epoch} is {value!r}, expected a number"
            elif name in SHARES and not 0 <= value <= 1:
                yield f"{name} of epoch {epoch.epoch} is {value}, expected a share from 0 to 1"
            elif value < 0:  # one that is not finite may be: the last batches have diverged
                yield f"{name} of epoch {epoch.epoch} is {value}, expected 0 or more"


def _where_and_how_long(result: Result) -> Iterator[str]:
    told = result.environment
    device = told.get("device", "") if isinstance(told, Mapping) else None
    if not isinstance(device, str) or not device or device.startswith("CPU"):
        yield f"its device is {device!r}, expected a GPU, as of the runs that it is paired with"
    if not _is_number(result.seconds) or not 0 <= result.seconds < math.inf:
        yield f"its seconds are {result.seconds!r}, expected a number of 0 or more"


def _counts(result: Result, run: Run) -> tuple[int, ...]:
    return () if result.status == DIVERGED else selected(run.setting.train, result.epochs)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
