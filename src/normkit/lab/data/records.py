"""What travels between reading, cutting into sets, and training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from normkit.errors import NormkitError
from normkit.lab.data.sampling import generator

Moments = tuple[tuple[float, ...], tuple[float, ...]]  # mean and std of each channel, in 0 … 1


class MissingData(NormkitError, FileNotFoundError):
    """A data set, or one of its files, is not where it was looked for."""


class CorruptData(NormkitError, ValueError):
    """A file is not what was published: another checksum, a wrong size, or unreadable."""


@dataclass(frozen=True, eq=False)
class Split:
    """One published part of a small set."""

    images: Tensor  # (N, C, H, W) uint8
    labels: Tensor  # (N,) int64
    white: int = 255  # the byte that means 1.0

    @cached_property
    def moments(self) -> Moments:
        """Mean and (biased) standard deviation of each channel, of values from 0 to 1."""
        total = torch.zeros(self.images.shape[1], dtype=torch.float64)
        squares = torch.zeros_like(total)
        for part in self.images.split(1024):
            values = part.float()
            total += values.sum((0, 2, 3), dtype=torch.float64)
            squares += values.square_().sum((0, 2, 3), dtype=torch.float64)
        count = self.images.numel() // self.images.shape[1]
        mean = total / count
        std = (squares / count - mean.square()).clamp(min=0).sqrt()
        return tuple((mean / self.white).tolist()), tuple((std / self.white).tolist())


@dataclass(frozen=True, eq=False)
class Raw:
    """A small set as it was published."""

    train: Split
    test: Split


@dataclass(frozen=True, eq=False)
class Files:
    """One published part of a set of image files."""

    paths: list[str]  # not Path: there may be millions
    labels: Tensor  # (N,) int64


@dataclass(frozen=True, eq=False)
class Listing:
    """A set of image files: nothing is decoded yet."""

    train: Files
    test: Files
    classes: int


class Loader:
    """Images and labels of one of the sets, in batches on the device."""

    device: torch.device

    def __len__(self) -> int:
        """How many samples."""
        raise NotImplementedError

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
        """float32 (B, C, H, W), normalized, and int64 (B,). A batch of 0 is the whole set.

        Which samples, in which order and how augmented depends on ``seed`` and ``epoch`` alone;
        ``start`` leaves out so many batches and changes nothing about those that follow.
        """
        batch = batch or len(self)
        last = len(self) // batch * batch if drop_last else len(self)
        cuts = [(first, min(first + batch, last)) for first in range(start * batch, last, batch)]
        order = self.order(seed, epoch, shuffle=shuffle)
        yield from self._load(order, cuts, seed, epoch, augment)

    def order(self, seed: int, epoch: int, *, shuffle: bool = True) -> Tensor:
        """(N,) int64 on the CPU: which sample comes when."""
        if not shuffle:
            return torch.arange(len(self))
        return torch.randperm(len(self), generator=generator("order", seed, epoch))

    def _load(
        self, order: Tensor, cuts: list[tuple[int, int]], seed: int, epoch: int, augment: bool
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The samples of each cut, from its first position of the order up to its last."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Sets:
    """A data set, ready to train on."""

    name: str
    train: Loader
    validation: Loader | None
    test: Loader
    classes: int
    shape: tuple[int, int, int]  # (C, H, W)
