"""The batches of an epoch: how many there are, and what each counts for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from normkit.errors import OptionError
from normkit.lab.experiment import Train

AnyBatch = TypeVar("AnyBatch")


@dataclass(frozen=True)
class EpochPlan:
    """The sizes of an epoch. A step of the optimizer takes ``accumulate`` batches."""

    batch: int
    accumulate: int
    samples: int  # of an epoch that are trained on
    epochs: int

    @classmethod
    def of(cls, train: Train, samples: int, own_batch: int | None = None) -> EpochPlan:
        """Of so many training samples; ``own_batch`` where the data comes in batches.

        With drop_last an incomplete last step is left out, so that k batches for each step are
        always what one batch of k times the size would be.
        """
        batch = own_batch or train.batch or samples
        together = batch * train.accumulate
        used = samples - samples % together if train.drop_last else samples
        if used < 1:
            raise OptionError(
                f"The training set has {samples} samples, and a step needs {together} "
                f"({train.accumulate} × {batch}) with drop_last: nothing would be trained. "
                "Try a smaller train.batch, or drop_last = false."
            )
        return cls(min(batch, used), train.accumulate, used, train.epochs)

    @property
    def batches(self) -> int:
        """Of an epoch."""
        return -(-self.samples // self.batch)

    @property
    def steps(self) -> int:
        """Of the optimizer in an epoch."""
        return -(-self.batches // self.accumulate)

    def size(self, batch: int) -> int:
        """How many samples a batch of an epoch has."""
        return min(self.batch, self.samples - batch * self.batch)

    def share(self, batch: int) -> float:
        """What a batch's mean loss counts for in its step: its share of the step's samples."""
        together = self.batch * self.accumulate
        first = batch // self.accumulate * together
        return self.size(batch) / min(together, self.samples - first)

    def in_steps(self, batches: Iterable[AnyBatch], done: int = 0) -> Iterator[list[AnyBatch]]:
        """The batches of each step of an epoch, without those of the first ``done`` steps."""
        rest = islice(batches, done * self.accumulate, self.batches)
        while step := list(islice(rest, self.accumulate)):
            yield step
