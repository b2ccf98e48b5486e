"""From a loader to what a step is given, and from that to images and labels inside the step.

Of a small set a step is given rows of the epoch's plan, and does the augmentation itself; so a
recorded step holds that as well. Of image files it is given the images.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from normkit.lab.data.mixing import mix, mixing_weights, soften
from normkit.lab.train.plan import Plan
from normkit.lab.train.precision import model_dtype

Inputs = tuple[Tensor, ...]


class Form:
    """The device, number type and memory format that a model wants its images in."""

    def __init__(self, device: torch.device, precision: str, channels_last: bool) -> None:
        self.device, self.dtype = device, model_dtype(precision)
        self.memory = torch.channels_last if channels_last else torch.preserve_format

    def __call__(self, images: Tensor) -> Tensor:
        return images.to(self.device, self.dtype, non_blocking=True, memory_format=self.memory)


class Feed:
    """The training batches of a run. The same seed gives every variant the same batches."""

    def __init__(
        self, loader: Any, plan: Plan, form: Form, *, seed: int, classes: int, mixup: float = 0.0
    ) -> None:
        self.loader, self.plan, self.form, self.seed = loader, plan, form, seed
        self.classes, self.mixup = classes, mixup
        self.planned = hasattr(loader, "plan") and hasattr(loader, "gather")

    def batches(self, epoch: int, start: int = 0) -> Iterator[Inputs]:
        """What the steps of an epoch are given, without the first ``start`` batches."""
        weights = None
        if self.mixup:
            weights = mixing_weights(
                self.mixup,
                len(self.loader),
                seed=self.seed,
                epoch=epoch,
                device=self.form.device,
            )
        for number, given in enumerate(self._given(epoch, start), start):
            first = number * self.plan.batch
            mixed = () if weights is None else (weights[first : first + self.plan.size(number)],)
            yield (*given, *mixed)

    def read(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Images and labels of a batch: tensor operations alone, for inside a step."""
        inputs, weights = (inputs[:-1], inputs[-1]) if self.mixup else (inputs, None)
        images, labels = self.loader.gather(*inputs) if self.planned else inputs
        images, labels = self.form(images), labels.to(self.form.device, non_blocking=True)
        if weights is not None:
            soft = soften(labels, self.classes).to(images.dtype)
            images, labels = mix(images, soft, weights.to(images.dtype))
        return images, labels

    def _given(self, epoch: int, start: int) -> Iterator[Inputs]:
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
