"""Batches that are smaller than the others: an epoch's last one, and a last worker's share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from normkit.lab import data
from normkit.lab.experiment import Data, Setting
from normkit.lab.train.plan import Plan


@dataclass(frozen=True)
class Last:
    """The end of an epoch."""

    total: int  # samples of the epoch
    batch: int  # of the last batch
    together: int  # the fewest that share statistics, in any batch

    def __str__(self) -> str:
        alone = self.together < self.batch
        share = f", and a worker has {self.together} of them" if alone else ""
        return (
            f"the last batch of an epoch has {self.batch} of {self.total:,} training samples{share}"
        )


def last_of(setting: Setting, count: Callable[[Data], int] = data.training_samples) -> Last:
    """What an epoch of a setting ends with; an error if it has no batch at all.

    >>> from normkit.lab.experiment import Train
    >>> print(last_of(Setting(Data("digits"), train=Train(batch=64, worker_batch=4))))
    the last batch of an epoch has 29 of 1,437 training samples, and a worker has 1 of them
    """
    plan = Plan.of(setting.train, count(setting.data))
    batch = plan.size(plan.batches - 1)
    worker = setting.train.worker_batch or plan.batch
    together = min(size % worker or worker for size in (plan.batch, batch))
    return Last(plan.samples, batch, together)
