"""Images with maps of classes, or with objects: what both kinds of sets share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from normkit.errors import OptionError
from normkit.lab.data.loaders import Cuts, Loader, Sets, decoding_processes, libraries
from normkit.lab.data.loading import check_kind
from normkit.lab.data.records import BoxListing, MapListing
from normkit.lab.data.sampling import counts, generator
from normkit.lab.experiment.records import Data

KEPT_PAIRS = 2_000  # of a set up to this, each is decoded once
WITH = {"boxes": "objects", "maps": "maps of classes"}
# of [data], what has no meaning for them
UNUSED = ("crop", "resized_crop", "rotation", "cutout", "mixup")


class PairLoader(Loader):
    """Images with maps or objects: those of a small set are decoded once and stay on the device."""

    def __init__(self, data: Any, count: int, device: torch.device | str) -> None:
        libraries()
        self.data, self.count, self.device = data, count, torch.device(device)
        self.kept: list[Any] | None = None
        if count <= KEPT_PAIRS:
            self.kept = [self._moved(data[index]) for index in range(count)]
        self.workers = decoding_processes(count)

    def __len__(self) -> int:
        return self.count

    def pairs(self, order: Tensor, cuts: Cuts) -> Iterator[list[Any]]:
        """A list for each batch."""
        rows = [order[first:last].tolist() for first, last in cuts]
        if self.kept is not None:
            yield from ([self.kept[index] for index in row] for row in rows)
            return
        loader = DataLoader(
            self.data,
            batch_sampler=rows,
            num_workers=min(self.workers, len(rows)),
            collate_fn=list,
            generator=generator("workers"),
        )
        yield from ([self._moved(pair) for pair in batch] for batch in loader)

    def _moved(self, pair: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        image, other = pair
        if isinstance(other, dict):
            other = {key: value.to(self.device) for key, value in other.items()}
        else:
            other = other.to(self.device, non_blocking=True)
        return image.to(self.device, non_blocking=True), other


def check_pairs(spec: Data, kind: str) -> None:
    """Refuse a set of another kind, and changes that maps and boxes do not go through."""
    check_kind(spec, kind)
    for key in UNUSED:
        if getattr(spec, key):
            raise OptionError(
                f"data.{key} is not for images with {WITH[kind]}: data.size and data.flip are."
            )


def pair_sets(
    spec: Data, kind: str, listing: BoxListing | MapListing, loader: Callable[[Any], PairLoader]
) -> Sets:
    """The sets that ``spec`` asks for. A validation set is drawn from the training images."""
    left, aside = counts(len(listing.train), spec)
    mixed = torch.randperm(len(listing.train), generator=generator(kind, spec.split_seed))
    train = loader(listing.train.take(mixed[aside : aside + left]))
    validation = loader(listing.train.take(mixed[:aside])) if aside else None
    _, height, width = train.data[0][0].shape
    return Sets(
        name=spec.name,
        train=train,
        validation=validation,
        test=loader(listing.test),
        classes=listing.classes,
        shape=(3, spec.size or height, spec.size or width),
    )
