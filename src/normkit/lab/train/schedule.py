"""The learning rate of every step, as a formula."""

from __future__ import annotations

import math

from normkit.errors import OptionError, nearest
from normkit.lab.experiment import Train

SCHEDULES = ("constant", "step", "cosine", "poly")


def rate(train: Train, base: float, step: int, steps: int) -> float:
    """The rate of a group that starts at ``base`` for a step, counted from 0 over all epochs.

    ``steps`` are those of an epoch; t is the time in epochs, a whole number with per="epoch":

        constant   base
        step       base · factor^(milestones that t has reached)
        cosine     floor + (base − floor) · (1 + cos(π·t/epochs)) / 2
        poly       floor + (base − floor) · (1 − t/epochs)^power

    The floor is the same for all groups, as eta_min of torch's CosineAnnealingLR is: a group with
    a lower base ends there too. A warm-up is a factor that rises with every step, from 0 at the
    first one to 1 after so many epochs; the schedule runs on underneath.

    >>> train = Train(epochs=10, lr=0.1, schedule="step", milestones=(5,), warmup=1)
    >>> [round(rate(train, 0.1, step, 100), 4) for step in (0, 50, 100, 500)]
    [0.0, 0.05, 0.1, 0.01]
    """
    passed = step / steps
    time = passed if train.per == "step" else float(step // steps)
    warm = min(1.0, passed / train.warmup) if train.warmup > 0 else 1.0
    return warm * _scheduled(train, base, time)


def _scheduled(train: Train, base: float, time: float) -> float:
    if train.schedule == "constant":
        return base
    if train.schedule == "step":
        return base * train.factor ** sum(mark <= time for mark in train.milestones)
    if train.schedule == "cosine":
        shape = (1 + math.cos(math.pi * time / train.epochs)) / 2
    elif train.schedule == "poly":
        shape = (1 - time / train.epochs) ** train.power
    else:
        raise OptionError(
            f"train.schedule is {train.schedule!r}. {nearest(train.schedule, SCHEDULES)}"
        )
    return train.floor + (base - train.floor) * shape
