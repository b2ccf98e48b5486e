"""A published set as it was read: small images in memory, or a list of files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
from torch import Tensor

from normkit.errors import NormkitError

if TYPE_CHECKING:
    from normkit.lab.data.trees import FileTree

ChannelMoments = tuple[
    tuple[float, ...], tuple[float, ...]
]  # mean and std of each channel, in 0 … 1


class MissingData(NormkitError, FileNotFoundError):
    """A data set, or one of its files, is not where it was looked for."""


class CorruptData(NormkitError, ValueError):
    """A file is not what was published: another checksum, a wrong size, or unreadable."""


class WrongEntry(CorruptData):
    """A box, line or label that cannot be, of a set that is there: no use to get it again."""


class LeftOut(UserWarning):
    """Something of a set that is not used, such as a box without area."""


@dataclass(frozen=True, eq=False)
class Split:
    """One published part of a small set."""

    images: Tensor  # (N, C, H, W) uint8
    labels: Tensor  # (N,) int64
    white: int = 255  # the byte that means 1.0

    def __len__(self) -> int:
        return len(self.labels)

    @cached_property
    def moments(self) -> ChannelMoments:
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


def open_file(path: str) -> BinaryIO:
    """An image that is a file of its own."""
    return open(path, "rb")


@dataclass(frozen=True, eq=False)
class Files:
    """One part of a set of encoded images: files, or entries of larger files."""

    paths: list[str]  # not Path: there may be millions. Of an entry, what errors call it
    labels: Tensor  # (N,) int64
    open: Callable[[str], BinaryIO] = open_file  # worker processes get a copy of it

    def __len__(self) -> int:
        return len(self.paths)

    def take(self, indices: Tensor) -> Files:
        paths = [self.paths[i] for i in indices.tolist()]
        return Files(paths, self.labels[indices], self.open)


@dataclass(frozen=True, eq=False)
class Listing:
    """A set of image files: nothing is decoded yet."""

    train: Files
    test: Files
    classes: int


@dataclass(frozen=True, eq=False)
class MapFiles:
    """One part of a set with a map of classes for each image: names in a tree."""

    images: list[str]
    maps: list[str]
    tree: FileTree

    def __len__(self) -> int:
        return len(self.images)

    def take(self, indices: Tensor) -> MapFiles:
        rows = sorted(indices.tolist())
        return MapFiles([self.images[i] for i in rows], [self.maps[i] for i in rows], self.tree)


@dataclass(frozen=True, eq=False)
class MapListing:
    """A set with a map of classes for each image: nothing is decoded yet."""

    train: MapFiles
    test: MapFiles
    classes: int
    void: int  # the index of what is not labelled


@dataclass(frozen=True, eq=False)
class Objects:
    """The objects of an image: boxes with labels from 1 on, or a file that numbers them."""

    boxes: Tensor  # (n, 4): left, top, right, bottom
    labels: Tensor  # (n,) int64
    crowd: Tensor  # (n,) bool: many in one, not judged
    mask: str = ""  # a file with a number for each object, in which the boxes are found
    outlines: list[Any] | None = None  # COCO's polygons and runs, decoded when their turn comes
    size: tuple[int, int] | None = None  # height and width that the annotation says


@dataclass(frozen=True, eq=False)
class BoxFiles:
    """One part of a set of images with objects: names in a tree."""

    images: list[str]
    objects: list[Objects]
    tree: FileTree

    def __len__(self) -> int:
        return len(self.images)

    def take(self, indices: Tensor) -> BoxFiles:
        rows = sorted(indices.tolist())
        return BoxFiles([self.images[i] for i in rows], [self.objects[i] for i in rows], self.tree)


@dataclass(frozen=True, eq=False)
class BoxListing:
    """A set of images with objects: no image is decoded yet."""

    train: BoxFiles
    test: BoxFiles
    classes: int  # of objects: the background is none


@dataclass(frozen=True, eq=False)
class DomainListing:
    """Several domains with the same classes."""

    domains: dict[str, Files]
    classes: int

    @property
    def train(self) -> list[str]:
        """Every image: which domain is trained on is the task's to say."""
        return [path for files in self.domains.values() for path in files.paths]

    test = train


@dataclass(frozen=True, eq=False)
class DigitDomains:
    """Several small sets of the same classes."""

    domains: dict[str, Raw]
    classes: int

    @property
    def train(self) -> list[int]:
        """Every label, to be counted."""
        return [label for raw in self.domains.values() for label in raw.train.labels.tolist()]

    @property
    def test(self) -> list[int]:
        return [label for raw in self.domains.values() for label in raw.test.labels.tolist()]


Content = (
    Raw | Listing | MapListing | BoxListing | DomainListing | DigitDomains
)  # what a reader of a published layout makes
