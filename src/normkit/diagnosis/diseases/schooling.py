"""Training of the reference models: seconds, on one core, the same for the same seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

BATCH = 64
EPOCHS = 6
RATE = 0.1

Loader = DataLoader[tuple[Tensor, ...]]


class Digits(NamedTuple):
    """Images (N, 1, 8, 8) with values from 0 to 1, and classes (N,): to train and to test on."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


def loader_of(
    images: Tensor,
    labels: Tensor,
    seed: int | None,
    batch: int = BATCH,
    drop_last: bool = True,
) -> Loader:
    """Batches in an order that depends on the seed; in that of the data if it is None."""
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return DataLoader(
        TensorDataset(images, labels),
        batch,
        shuffle=seed is not None,
        drop_last=drop_last,
        generator=generator,
    )


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Random numbers of a seed inside; those of the caller go on as before."""
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        yield


def school(
    model: nn.Module,
    loader: Loader,
    *,
    epochs: int = EPOCHS,
    rate: float = RATE,
    before: Callable[[int], Any] | None = None,
    after: Callable[[int], Any] | None = None,
    prepare: Callable[[torch.optim.Optimizer], Any] | None = None,
) -> int:
    """Train with a rate that rises and falls; ``before`` and ``after`` each epoch something else.

    Returns how many steps were made. The modes of the model are the caller's.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=rate, momentum=0.9, weight_decay=1e-4)
    steps = epochs * len(loader)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=rate, total_steps=steps)
    if prepare is not None:
        prepare(optimizer)
    with torch.enable_grad():
        for epoch in range(epochs):
            if before is not None:
                before(epoch)
            for images, labels in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(images), labels).backward()
                optimizer.step()
                schedule.step()
            if after is not None:
                after(epoch)
    return steps
