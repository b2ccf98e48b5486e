"""The batches of an epoch: how many there are, what each counts for, and what a step is given.

Of a small set a step is given rows of the epoch's plan, and does the augmentation itself; so a
recorded step holds that as well. Of image files it is given the images.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor

from normkit.errors import OptionError
from normkit.lab.data import mix, mixing_weights, soften
from normkit.lab.experiment import Train
from normkit.lab.train.device import model_dtype

Inputs = tuple[Tensor, ...]
AnyBatch = TypeVar("AnyBatch")


@dataclass(frozen=True)
class EpochPlan:
    """The sizes of an epoch. A step of the optimizer takes ``accumulate`` batches."""

    batch: int
    accumulate: int
    samples: int  # of an epoch that are trained on
    epochs: int

    @classmethod
    def of(cls, train: Train, samples: int) -> EpochPlan:
        """Of so many training samples.

        With drop_last an incomplete last step is left out, so that k batches for each step are
        always what one batch of k times the size would be.
        """
        batch = train.batch or samples
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


class ImageFormat:
    """The device, number type and memory format that a model wants its images in."""

    def __init__(self, device: torch.device, precision: str, channels_last: bool) -> None:
        self.device, self.dtype = device, model_dtype(precision)
        self.memory = torch.channels_last if channels_last else torch.preserve_format

    def __call__(self, images: Tensor) -> Tensor:
        return images.to(self.device, self.dtype, non_blocking=True, memory_format=self.memory)


class BatchFeed:
    """The training batches of a run. The same seed gives every variant the same batches."""

    def __init__(
        self,
        loader: Any,
        plan: EpochPlan,
        format: ImageFormat,
        *,
        seed: int,
        classes: int,
        mixup: float = 0.0,
    ) -> None:
        self.loader, self.plan, self.format, self.seed = loader, plan, format, seed
        self.classes, self.mixup = classes, mixup
        self.planned = hasattr(loader, "plan") and hasattr(loader, "gather")

    def batches(self, epoch: int, start: int = 0) -> Iterator[Inputs]:
        """What the steps of an epoch are given, without the first ``start`` batches."""
        inputs = self._without_mixup(epoch, start)
        if not self.mixup:
            yield from inputs
            return
        weights = mixing_weights(
            self.mixup, len(self.loader), seed=self.seed, epoch=epoch, device=self.format.device
        )
        for number, given in enumerate(inputs, start):
            first = number * self.plan.batch
            yield (*given, weights[first : first + self.plan.size(number)])

    def read(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Images and labels of a batch: tensor operations alone, for inside a step."""
        inputs, weights = (inputs[:-1], inputs[-1]) if self.mixup else (inputs, None)
        images, labels = self.loader.gather(*inputs) if self.planned else inputs
        images, labels = self.format(images), labels.to(self.format.device, non_blocking=True)
        if weights is not None:
            soft = soften(labels, self.classes).to(images.dtype)
            images, labels = mix(images, soft, weights.to(images.dtype))
        return images, labels

    def _without_mixup(self, epoch: int, start: int) -> Iterator[Inputs]:
        size, last = self.plan.batch, self.plan.samples
        if self.planned:
            rows = self.loader.plan(self.seed, epoch)
            for first in range(start * size, last, size):
                yield (rows[first : min(first + size, last)],)
        else:
            yield from self.loader.batches(
                size,
                seed=self.seed,
                epoch=epoch,
                shuffle=True,
                drop_last=last < len(self.loader),
                augment=True,
                start=start,
            )
