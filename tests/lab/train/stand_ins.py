"""A loader, sets and networks of a few numbers, with the interface of the real ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from normkit.lab.experiment import Data, Run, Setting, Train, Watch
from normkit.lab.results import Result
from normkit.lab.train import Training


class Batches:
    """Images and labels in memory; ``seen`` are the indices of every batch that was handed out."""

    def __init__(self, samples: int, shape: tuple[int, int, int], classes: int, seed: int) -> None:
        drawn = torch.Generator().manual_seed(seed)
        self.labels = torch.arange(samples) % classes
        noise = torch.randn(samples, *shape, generator=drawn)
        means = torch.randn(classes, shape[0], 1, 1, generator=drawn)
        self.images = noise + 2 * means[self.labels]
        self.device = torch.device("cpu")
        self.seen: list[list[int]] = []

    def __len__(self) -> int:
        return len(self.labels)

    def batches(
        self,
        batch: int,
        *,
        seed: int = 0,
        epoch: int = 0,
        shuffle: bool = False,
        drop_last: bool = False,
        augment: bool = False,
        start: int = 0,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.arange(len(self))
        if shuffle:
            drawn = torch.Generator().manual_seed(1000 * epoch + seed % 1000)
            order = torch.randperm(len(self), generator=drawn)
        parts = list(order.split(batch))
        if drop_last and len(parts[-1]) < batch:
            parts.pop()
        for part in parts[start:]:
            self.seen.append(part.tolist())
            yield self.images[part], self.labels[part]


@dataclass(frozen=True, eq=False)
class Sets:
    train: Any
    validation: Any
    test: Any
    classes: int = 3
    shape: tuple[int, int, int] = (2, 5, 5)
    name: str = "stand-in"


def sets(samples: int = 22, *, validation: int = 0) -> Sets:
    """Three classes; the test set has 9 samples."""
    sizes = (samples, validation, 9)
    loaders = [
        Batches(n, Sets.shape, Sets.classes, seed=i) if n else None for i, n in enumerate(sizes)
    ]
    return Sets(*loaders)


def network(norm: Any = nn.BatchNorm2d, *, dropout: float = 0.0) -> nn.Module:
    """Two convolutions with norms; the same weights each time."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(2, 4, 3, bias=False),
            norm(4),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Conv2d(4, 4, 3, bias=False),
            norm(4),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(4, 3),
        )


USUAL = Setting(train=Train(epochs=3, batch=8, lr=0.05))


def run(seed: int = 1, *, data: Data = USUAL.data, watch: Watch = USUAL.watch, **train: Any) -> Run:
    """A run of three epochs with 8 samples a batch, unless told otherwise."""
    return Run(Setting(data=data, train=replace(USUAL.train, **train), watch=watch), seed)


def numbers(result: Result) -> Result:
    """A result without what depends on the clock."""
    epochs = tuple(replace(epoch, seconds=0.0) for epoch in result.epochs)
    return replace(result, epochs=epochs, seconds=0.0, images_per_second=None)


def until_epoch_ends(training: Training) -> None:
    """All pieces of an epoch."""
    before = training.epoch
    while training.epoch == before and training.step():
        pass
