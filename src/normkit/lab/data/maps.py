"""Batches of images with a class for every pixel.

A batch is images (B, 3, H, W), normalized, and maps of classes (B, H, W) int64, in which VOID is
what nobody has labelled. Training windows are cut on the device, of a random scale, place and side;
evaluation sees whole images.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

from normkit.errors import OptionError
from normkit.lab.data.loaders import Cuts, Sets
from normkit.lab.data.loading import content_of
from normkit.lab.data.map_files import VOID, read_pair, size_of
from normkit.lab.data.pairs import KEPT_PAIRS, PairLoader, check_pairs, pair_sets
from normkit.lab.data.records import CorruptData, MapFiles, MapListing
from normkit.lab.data.sampling import generator
from normkit.lab.data.transforms import IMAGENET, coefficients
from normkit.lab.experiment.records import Data


def check_maps(listing: MapListing) -> None:
    """Read every image and map of a small set, so that what is wrong, or a set without a label,
    is told before anything trains."""
    for part in (listing.train, listing.test):
        if len(part) > KEPT_PAIRS:
            continue
        pairs = (read_pair(listing, part, index) for index in range(len(part)))
        if not sum(bool((classes != VOID).any()) for _, classes in pairs):
            name = "training" if part is listing.train else "test"
            raise CorruptData(
                f"{part.tree.place}: none of the {len(part):,} {name} maps has a class, all is "
                f"void: expected some from 0 to {listing.classes - 1}."
            )


# ------------------------------------------------------------------ batches


@dataclass(frozen=True)
class WindowCut:
    """What a training image goes through: scaled by a random factor, cut to a square, mirrored."""

    size: int | None  # None: whole images, which then have to be of one size
    flip: bool = False
    scales: tuple[float, float] = (1.0, 1.0)

    def __call__(self, image: Tensor, classes: Tensor, draw: Sequence[float]) -> list[Tensor]:
        """Of a normalized image (C, H, W) and its map (H, W); ``draw`` are four in 0 … 1."""
        if self.size is not None:
            low, high = self.scales
            side = max(1, round(self.size / (low + (high - low) * draw[0])))
            more = [0, max(0, side - image.shape[2]), 0, max(0, side - image.shape[1])]
            image = F.pad(image, more)  # zero is the mean
            classes = F.pad(classes, more, value=VOID)
            top = int(draw[1] * (image.shape[1] - side + 1))
            left = int(draw[2] * (image.shape[2] - side + 1))
            image = image[:, top : top + side, left : left + side]
            classes = classes[top : top + side, left : left + side]
            if side != self.size:
                square = (self.size, self.size)
                shrinks = side > self.size
                image = F.interpolate(image[None], square, mode="bilinear", antialias=shrinks)[0]
                nearest = F.interpolate(classes[None, None].float(), square, mode="nearest-exact")
                classes = nearest[0, 0]
        if self.flip and draw[3] < 0.5:
            image, classes = image.flip(2), classes.flip(1)
        return [image, classes.long()]


class MapLoader(PairLoader):
    """Images and maps of one of the sets."""

    def __init__(
        self,
        listing: MapListing,
        files: MapFiles,
        cut: WindowCut,
        normalize: str = "dataset",
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(_Pairs(listing, files), len(files), device)
        scale, shift = coefficients(normalize, IMAGENET, 255)
        self.cut, self.scale, self.shift = cut, scale.to(self.device), shift.to(self.device)

    def chosen(
        self, order: Tensor, cuts: Cuts, *, seed: int = 0, epoch: int = 0, augment: bool = False
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """In evaluation, images of one batch that differ in size come as several batches."""
        draws = torch.rand(len(self), 4, generator=generator("windows", seed, epoch)).tolist()
        for (first, last), pairs in zip(cuts, self.pairs(order, cuts), strict=True):
            floats = [((image * self.scale + self.shift)[0], classes) for image, classes in pairs]
            if augment:
                rows = zip(floats, draws[first:last], strict=True)
                yield self._stacked([self.cut(*pair, draw) for pair, draw in rows])
                continue
            for _, group in groupby(floats, key=lambda pair: pair[1].shape):
                yield self._stacked([[image, classes.long()] for image, classes in group])

    def _stacked(self, pieces: list[list[Tensor]]) -> tuple[Tensor, Tensor]:
        if len({piece.shape for _, piece in pieces}) > 1:
            sizes = " and ".join(sorted({size_of(piece) for _, piece in pieces})[:2])
            raise OptionError(
                f"The images of a batch have {sizes} pixels. Try data.size, the side of the "
                "windows that are cut from them."
            )
        images, maps = zip(*pieces, strict=True)
        return torch.stack(images), torch.stack(maps)


class _Pairs(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, listing: MapListing, files: MapFiles) -> None:
        self.listing, self.files = listing, files

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return read_pair(self.listing, self.files, index)


def map_listing(spec: Data) -> MapListing:
    """The files of a set of maps."""
    check_pairs(spec, "maps")
    content = content_of(spec)
    assert isinstance(content, MapListing)
    return content


def load_maps(spec: Data, scales: tuple[float, float], device: torch.device | str) -> Sets:
    listing = map_listing(spec)
    cut = WindowCut(spec.size, spec.flip, scales)

    def loader(files: MapFiles) -> MapLoader:
        return MapLoader(listing, files, cut, spec.normalize, device)

    return pair_sets(spec, "maps", listing, loader)
