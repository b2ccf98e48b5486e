"""Big sets: image files, decoded by worker processes, normalized on the training device."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from normkit.lab.data.augmentation import Augmentation
from normkit.lab.data.decoding import Decoder, libraries
from normkit.lab.data.normalization import normalize
from normkit.lab.data.records import Files, bounds
from normkit.lab.data.seeding import generator, stream

Ask = tuple[int, int | None]  # which file, and the seed of its augmentation
FEW = 256  # files that are read before worker processes would have started
MOST = 8  # worker processes


class _Decoded(Dataset[tuple[Tensor, int]]):
    """The files, as a worker process sees them."""

    def __init__(self, files: Files, decoder: Decoder) -> None:
        self.paths, self.labels, self.decoder = files.paths, files.labels.tolist(), decoder

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, ask: Ask) -> tuple[Tensor, int]:
        which, seed = ask
        return self.decoder(self.paths[which], seed), self.labels[which]


class _Asks:
    """What is asked of the workers, batch after batch."""

    def __init__(self, order: Tensor, cuts: list[tuple[int, int]], seed: int | None) -> None:
        self.order, self.cuts, self.seed = order, cuts, seed

    def __len__(self) -> int:
        return len(self.cuts)

    def __iter__(self) -> Iterator[list[Ask]]:
        for begin, end in self.cuts:
            which = self.order[begin:end].tolist()
            if self.seed is None:
                yield [(each, None) for each in which]
            else:  # a seed for each position, whichever worker comes to it
                yield [(each, self.seed + begin + i) for i, each in enumerate(which)]


class FileLoader:
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
        self.data = _Decoded(files, Decoder(size, augmentation, tuple(zero)))
        self.workers = _workers(len(files.paths)) if workers is None else workers

    def __len__(self) -> int:
        return len(self.files.paths)

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
            order = torch.randperm(len(self), generator=generator("order", seed, epoch))
        cuts = list(bounds(len(self), batch, drop_last, start))
        first = stream("image", seed, epoch) >> 1 if augment else None
        loader = DataLoader(
            self.data,
            batch_sampler=_Asks(order, cuts, first),
            num_workers=min(self.workers, len(cuts)),
            pin_memory=self.device.type == "cuda",
            generator=generator("workers"),  # else it would draw from the global one
        )
        for images, labels in loader:
            images = images.to(self.device, non_blocking=True)
            labels = labels.to(self.device, non_blocking=True)
            yield normalize(images, self.scale, self.shift), labels


def _workers(files: int) -> int:
    if files <= FEW or multiprocessing.current_process().daemon:  # which may have no children
        return 0
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(MOST, cpus or 1)
