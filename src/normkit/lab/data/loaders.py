"""Batches on the training device: from bytes in memory, or from image files."""

from __future__ import annotations

import multiprocessing
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import Any, BinaryIO

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from normkit.core.optional_dependencies import require
from normkit.lab.data.records import CorruptData, Files, open_file
from normkit.lab.data.sampling import generator, stream
from normkit.lab.data.transforms import (
    INDEX,
    Augmentation,
    Holes,
    Windows,
    boxes,
    mirror,
    normalize,
    turn,
)

Cuts = list[tuple[int, int]]  # the first position of each batch, and the one after its last
Request = tuple[int, int | None]  # which file, and the seed of its augmentation
FEW_FILES = 256  # read before worker processes would have started
# A set up to this is decoded once and stays in memory: for small images the start of worker
# processes takes longer than an epoch, and several runs side by side would start them all
KEPT_FILES, KEPT_BYTES = 5_000, 1 << 28
MOST_WORKERS = 8
SHORTER_SIDE = 8 / 7  # before the middle is cut out: 256 pixels for 224
NO_AUGMENTATION = Augmentation()


class Loader:
    """Images and labels of one of the sets, in batches on the device."""

    device: torch.device
    # of each batch, the part that is read: where several processes share the batches
    only: Callable[[int, int], tuple[int, int]] | None = None

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
        if self.only is not None and shuffle:
            cuts = [self.only(*cut) for cut in cuts]
        order = self.order(seed, epoch, shuffle=shuffle)
        yield from self.chosen(order, cuts, seed=seed, epoch=epoch, augment=augment)

    def order(self, seed: int, epoch: int, *, shuffle: bool = True) -> Tensor:
        """(N,) int64 on the CPU: which sample comes when."""
        if not shuffle:
            return torch.arange(len(self))
        return torch.randperm(len(self), generator=generator("order", seed, epoch))

    def chosen(
        self, order: Tensor, cuts: Cuts, *, seed: int = 0, epoch: int = 0, augment: bool = False
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of chosen samples: those of each cut, from its first position of the order up to
        its last, as evaluation sees them or augmented."""
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


class TensorLoader(Loader):
    """Batches from tensors. Made by ``load``; images are bytes (N, C, H, W).

    >>> from normkit.lab.data import load
    >>> from normkit.lab.experiment import Data
    >>> train = load(Data("digits", crop=1)).train
    >>> plan = train.plan(seed=1, epoch=0)
    >>> images, labels = train.gather(plan[:64])
    >>> tuple(images.shape), images.dtype, labels.dtype
    ((64, 1, 8, 8), torch.float32, torch.int64)
    """

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        scale: Tensor,
        shift: Tensor,
        augmentation: Augmentation = NO_AUGMENTATION,
        device: torch.device | str = "cpu",
        white: int = 255,  # the byte that means 1.0
    ) -> None:
        self.device, self.white = torch.device(device), white
        self.augmentation = augmentation
        self.shape: tuple[int, int, int] = (images.shape[1], images.shape[2], images.shape[3])
        images = images.to(self.device)
        padding = augmentation.crop
        if padding:  # black, before normalization, as a crop of the picture itself would see it
            images = F.pad(images, (padding,) * 4)
        self.images, self.labels = images, labels.to(self.device)
        self.scale, self.shift = scale.to(self.device), shift.to(self.device)
        _, height, width = self.shape
        self._inner = images[:, :, padding : padding + height, padding : padding + width]
        self._windows = Windows(images, padding) if padding else None
        side = augmentation.cutout
        self._holes = Holes(side, height, width, self.device) if side else None

    def __len__(self) -> int:
        return self.labels.shape[0]

    def plan(self, seed: int, epoch: int, *, shuffle: bool = True) -> Tensor:
        """(N, COLUMNS) int64 on the device: all that is random about an epoch.

        Any run of its rows is a batch for ``gather``. Without augmentation it is the order alone.
        """
        return self._planned(self.order(seed, epoch, shuffle=shuffle), seed, epoch)

    def gather(self, which: Tensor) -> tuple[Tensor, Tensor]:
        """Images, normalized, and labels: of rows of a plan, or plain ones of (B,) of an order."""
        if which.dim() == 1:
            images = self._inner.index_select(0, which)
            return normalize(images, self.scale, self.shift), self.labels.index_select(0, which)
        augmentation = self.augmentation
        index = which[:, INDEX]
        windows = self._windows
        images = windows.cut(which) if windows else self.images.index_select(0, index)
        if augmentation.turns:
            images = turn(images, which, smooth=augmentation.resized_crop)
        elif augmentation.flip:
            images = mirror(images, which)
        images = normalize(images, self.scale, self.shift)
        if self._holes:  # after normalization: zero is the mean
            images = self._holes.cut(images, which)
        return images, self.labels.index_select(0, index)

    def chosen(
        self, order: Tensor, cuts: Cuts, *, seed: int = 0, epoch: int = 0, augment: bool = False
    ) -> Iterator[tuple[Tensor, Tensor]]:
        rows = self._planned(order, seed, epoch) if augment else self._moved(order)
        for first, last in cuts:
            yield self.gather(rows[first:last])

    def _planned(self, order: Tensor, seed: int, epoch: int) -> Tensor:
        if self.augmentation == NO_AUGMENTATION:
            return self._moved(order)
        return self._moved(self.augmentation.plan(order, self.shape, seed, epoch))

    def _moved(self, drawn: Tensor) -> Tensor:
        if self.device.type == "cuda":  # from pinned memory the host need not wait for the copy
            return drawn.pin_memory().to(self.device, non_blocking=True)
        return drawn.to(self.device)


class FileLoader(Loader):
    """Batches from image files. Made by ``load``."""

    def __init__(
        self,
        files: Files,
        size: int,
        scale: Tensor,
        shift: Tensor,
        augmentation: Augmentation,
        device: torch.device | str = "cpu",
        workers: int | None = None,
    ) -> None:
        libraries()  # here already: worker processes inherit them, and lacking ones are told now
        self.device = torch.device(device)
        self.files = files
        zero = (-shift / scale).round().clamp(0, 255).flatten().int().tolist()
        self.scale, self.shift = scale.to(self.device), shift.to(self.device)
        decoder, count = Decoder(size, augmentation, tuple(zero)), len(files.paths)
        keep = count <= KEPT_FILES and count * decoder.bytes_kept() <= KEPT_BYTES
        keep &= workers is None and decoder.resizes_alike
        self.data = DecodedFiles(files, decoder, keep)
        default = 0 if keep else decoding_processes(count)
        self.workers = default if workers is None else workers

    def __len__(self) -> int:
        return len(self.files.paths)

    def chosen(
        self, order: Tensor, cuts: Cuts, *, seed: int = 0, epoch: int = 0, augment: bool = False
    ) -> Iterator[tuple[Tensor, Tensor]]:
        first = stream("image", seed, epoch) >> 1

        def requests() -> Iterator[list[Request]]:
            for begin, end in cuts:
                # a seed for each position, whichever worker comes to it
                seeds = range(first + begin, first + end) if augment else repeat(None)
                yield list(zip(order[begin:end].tolist(), seeds, strict=False))

        loader = DataLoader(
            self.data,
            batch_sampler=requests(),
            num_workers=min(self.workers, len(cuts)),
            pin_memory=self.device.type == "cuda",
            generator=generator("workers"),  # else it would draw from the global one
        )
        for images, labels in loader:
            images = images.to(self.device, non_blocking=True)
            labels = labels.to(self.device, non_blocking=True)
            yield normalize(images, self.scale, self.shift), labels


class DecodedFiles(Dataset[tuple[Tensor, int]]):
    """The files, as a worker process sees them; with ``keep`` each is decoded once."""

    def __init__(self, files: Files, decoder: Decoder, keep: bool = False) -> None:
        self.paths, self.labels, self.open = files.paths, files.labels.tolist(), files.open
        self.decoder, self.keep = decoder, keep
        self.kept: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, request: Request) -> tuple[Tensor, int]:
        index, seed = request
        if not self.keep:
            return self.decoder(decoded(self.paths[index], self.open), seed), self.labels[index]
        if index not in self.kept:
            self.kept[index] = self.decoder.resized(decoded(self.paths[index], self.open))
        return self.decoder.cut(self.kept[index], seed), self.labels[index]


@dataclass(frozen=True)
class Decoder:
    """Brings an image to size × size."""

    size: int
    augmentation: Augmentation
    fill: tuple[int, ...]  # bytes of a cutout: what becomes zero

    @property
    def resizes_alike(self) -> bool:
        """Whether an image is brought to one size first, whatever is drawn for it."""
        return not self.augmentation.resized_crop

    def bytes_kept(self) -> int:
        """Of an image, square, before it is cut."""
        return 3 * self._larger()[0] ** 2

    def __call__(self, image: Tensor, seed: int | None) -> Tensor:
        """(3, size, size) uint8; without a seed, as evaluation sees it."""
        return self.cut(self.resized(image) if seed is None or self.resizes_alike else image, seed)

    def resized(self, image: Tensor) -> Tensor:
        """At the size that is cropped."""
        functional, _ = libraries()
        resized: Tensor = functional.resize(image, self._larger(), antialias=True)
        return resized

    def cut(self, image: Tensor, seed: int | None) -> Tensor:
        """Of an image that has been resized, if it is to be at all."""
        functional, _ = libraries()
        if seed is None:
            middle: Tensor = functional.center_crop(image, [self.size, self.size])
            return middle
        return self._augmented(image, functional, random.Random(seed))

    def _larger(self) -> list[int]:
        """The size that is cropped: a square with a margin to move in, or by the shorter side."""
        if self.augmentation.crop:
            return [self.size + 2 * self.augmentation.crop] * 2
        return [round(self.size * SHORTER_SIDE)]

    def _augmented(self, image: Tensor, functional: Any, draw: random.Random) -> Tensor:
        augmentation, size = self.augmentation, [self.size, self.size]
        if augmentation.resized_crop:
            drawn = torch.Generator().manual_seed(draw.getrandbits(63))
            box = boxes(1, image.shape[1], image.shape[2], drawn)[0].tolist()
            image = functional.resized_crop(image, *box, size, antialias=True)
        elif augmentation.crop:
            top, left = (
                draw.randint(0, 2 * augmentation.crop),
                draw.randint(0, 2 * augmentation.crop),
            )
            image = functional.crop(image, top, left, *size)
        else:
            image = functional.center_crop(image, size)
        if augmentation.flip and draw.random() < 0.5:
            image = functional.horizontal_flip(image)
        if augmentation.rotation:
            image = functional.rotate(
                image, draw.uniform(-augmentation.rotation, augmentation.rotation)
            )
        if augmentation.cutout:
            top, left = (draw.randrange(self.size) - augmentation.cutout // 2 for _ in range(2))
            image = image.clone()  # it may be part of one that is kept
            hole = image[
                :,
                max(top, 0) : top + augmentation.cutout,
                max(left, 0) : left + augmentation.cutout,
            ]
            hole.copy_(torch.tensor(self.fill, dtype=torch.uint8).view(3, 1, 1))
        return image


def libraries() -> tuple[Any, Any]:
    """torchvision's functions and Pillow."""
    vision = "torchvision.transforms.v2.functional"
    return require(vision, "models", "image files"), require("PIL.Image", "models", "image files")


def decoded(path: str, opened: Callable[[str], BinaryIO] = open_file) -> Tensor:
    """(3, H, W) uint8 of any image."""
    _, pillow = libraries()
    try:
        with opened(path) as content, pillow.open(content) as file:
            image = file.convert("RGB")
    except (OSError, SyntaxError, ValueError) as error:  # whatever a damaged file leads to
        reason = str(error).rstrip(".")
        raise CorruptData(f"{path} cannot be read as an image: {reason}.") from error
    rows = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return rows.view(image.height, image.width, 3).permute(2, 0, 1).contiguous()


def decoding_processes(files: int) -> int:
    """How many worker processes decode so many image files."""
    if files <= FEW_FILES or multiprocessing.current_process().daemon:  # which may have no children
        return 0
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(MOST_WORKERS, cpus or 1)
