"""The learning rate of every step: schedules of the lab, and any scheduler of torch."""

from __future__ import annotations

import inspect
import math
from functools import cache
from typing import Any

import torch

from normkit.errors import NormkitError, OptionError, nearest
from normkit.lab.experiment import Train
from normkit.lab.experiment.rules import CHOICES
from normkit.lab.own_code import find, own_error_words

ONE_CYCLE = "torch.optim.lr_scheduler:OneCycleLR"


def rate(train: Train, base: float, step: int, steps: int, folder: str = "") -> float:
    """The rate of a group that starts at ``base`` for a step, counted from 0 over all epochs.

    ``steps`` are those of an epoch; t is the time in epochs, a whole number with per="epoch":

        constant   base
        step       base · factor^(milestones that t has reached)
        cosine     floor + (base − floor) · (1 + cos(π·t/epochs)) / 2
        poly       floor + (base − floor) · (1 − t/epochs)^power
        one_cycle  torch's OneCycleLR, up to base and down again

    The floor is the same for all groups, as eta_min of torch's CosineAnnealingLR is: a group with
    a lower base ends there too. Other schedulers are named as package.module:Class. A warm-up is a
    factor that rises with every step, from 0 at the first one to 1 after so many epochs; the
    schedule runs on underneath.

    >>> train = Train(epochs=10, lr=0.1, schedule="step", milestones=(5,), warmup=1)
    >>> [round(rate(train, 0.1, step, 100), 4) for step in (0, 50, 100, 500)]
    [0.0, 0.05, 0.1, 0.01]
    """
    passed = step / steps
    time = passed if train.per == "step" else float(step // steps)
    warm = min(1.0, passed / train.warmup) if train.warmup > 0 else 1.0
    if train.schedule == "constant":
        return warm * base
    if train.schedule == "step":
        return warm * (base * train.factor ** sum(mark <= time for mark in train.milestones))
    if train.schedule == "cosine":
        shape = (1 + math.cos(math.pi * time / train.epochs)) / 2
    elif train.schedule == "poly":
        shape = (1 - time / train.epochs) ** train.power
    else:
        table = scheduled(train, base, steps, folder)
        return warm * table[min(step if train.per == "step" else step // steps, len(table) - 1)]
    return warm * (train.floor + (base - train.floor) * shape)


def scheduled(train: Train, base: float, steps: int, folder: str = "") -> tuple[float, ...]:
    """All rates that a scheduler of torch's kind would give, by step or by epoch.

    They are computed beforehand, with a parameter that nobody needs: so a run has no state of a
    scheduler to keep, and a recorded step reads its rate from a tensor like any other.
    """
    options = tuple(sorted((key, repr(value)) for key, value in train.schedule_options.items()))
    count = train.epochs * (steps if train.per == "step" else 1)
    key = (train.schedule, options, train.schedule_options, base, count, folder)
    return _table(_Key(*key))


class _Key:
    """What a table of rates depends on; options are compared by their text."""

    def __init__(
        self, name: str, text: Any, options: Any, base: float, count: int, folder: str
    ) -> None:
        self.same = (name, text, base, count, folder)
        self.options = dict(options)

    def __hash__(self) -> int:
        return hash(self.same)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self.same == other.same


@cache
def _table(key: _Key) -> tuple[float, ...]:
    name, _, base, count, folder = key.same
    reference = ONE_CYCLE if name == "one_cycle" else name
    if ":" not in reference:
        raise OptionError(f"train.schedule is {name!r}. {nearest(name, CHOICES['train.schedule'])}")
    kind = find(reference, folder)
    try:
        known = inspect.signature(kind).parameters
        if "metrics" in inspect.signature(kind.step).parameters:
            raise OptionError(
                f"train.schedule: {name} follows a metric, and rates are known before training. "
                "Try stop_after, or another scheduler."
            )
        usual = {"total_steps": count, "T_max": count, "max_lr": base, "cycle_momentum": False}
        options = {k: v for k, v in usual.items() if k in known} | key.options
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=base)
        scheduler = kind(optimizer, **options)
        rates = []
        for _ in range(count):
            rates.append(float(optimizer.param_groups[0]["lr"]))
            optimizer.step()
            if len(rates) < count:
                scheduler.step()
    except NormkitError:
        raise
    except (Exception, SystemExit) as error:
        raise OptionError(
            f"train.schedule: {name} could not be used: {own_error_words(error)}."
        ) from error
    return tuple(rates)
