"""Batches of images with objects: lists, since sizes and numbers of objects differ.

A batch is a list of images (3, H, W) from 0 to 1 and a list of targets as torchvision's detectors
take them: boxes (n, 4), labels (n,) from 1 on, and masks (n, H, W) where the set has them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from normkit.errors import OptionError
from normkit.lab.data.box_files import check_outlines, read_masks
from normkit.lab.data.loaders import Cuts, Sets, decoded
from normkit.lab.data.loading import content_of
from normkit.lab.data.pairs import KEPT_PAIRS, PairLoader, check_pairs, pair_sets
from normkit.lab.data.records import BoxFiles, BoxListing, CorruptData
from normkit.lab.data.sampling import generator
from normkit.lab.experiment.records import Data

Target = dict[str, Tensor]
SMALLEST = 2  # pixels of a box that a window has cut off


class BoxLoader(PairLoader):
    """Images and their objects, of one of the sets."""

    # what normalized images are made of: torchvision's detectors normalize them inside
    scale, shift, white = torch.ones(1), torch.zeros(1), 1

    def __init__(
        self,
        files: BoxFiles,
        size: int | None,
        flip: bool,
        masks: bool,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(_ImagesWithObjects(files, masks), len(files), device)
        self.size, self.flip = size, flip

    def chosen(
        self, order: Tensor, cuts: Cuts, *, seed: int = 0, epoch: int = 0, augment: bool = False
    ) -> Iterator[Any]:
        draws = torch.rand(len(self), 3, generator=generator("windows", seed, epoch)).tolist()
        for (first, last), samples in zip(cuts, self.pairs(order, cuts), strict=True):
            if augment:
                rows = zip(samples, draws[first:last], strict=True)
                samples = [self.cut(image, target, draw) for (image, target), draw in rows]
            yield [each.float() / 255 for each, _ in samples], [_filled(t) for _, t in samples]

    def cut(self, image: Tensor, target: Target, draw: Sequence[float]) -> tuple[Tensor, Target]:
        """A window at a random place, perhaps mirrored; what it leaves of an object stays."""
        target = dict(target)
        if self.size is not None:
            height, width = (min(self.size, side) for side in image.shape[1:])
            top = int(draw[0] * (image.shape[1] - height + 1))
            left = int(draw[1] * (image.shape[2] - width + 1))
            image = image[:, top : top + height, left : left + width]
            if "numbers" in target:
                target["numbers"] = target["numbers"][top : top + height, left : left + width]
            if "masks" in target:
                target["masks"] = target["masks"][:, top : top + height, left : left + width]
            corner = target["boxes"].new_tensor([left, top, left, top])
            limits = target["boxes"].new_tensor([width, height, width, height])
            boxes = (target["boxes"] - corner).clamp(min=0).minimum(limits)
            target["boxes"] = boxes
            seen = ((boxes[:, 2:] - boxes[:, :2]) >= SMALLEST).all(1)
            rows = ("boxes", "labels", "iscrowd", "ids", "masks")
            target |= {key: target[key][seen] for key in rows if key in target}
        if self.flip and draw[2] < 0.5:
            image = image.flip(2)
            for key in ("numbers", "masks"):
                if key in target:
                    target[key] = target[key].flip(-1)
            begin, above, end, below = target["boxes"].unbind(1)
            across = image.shape[2]
            target["boxes"] = torch.stack([across - end, above, across - begin, below], dim=1)
        return image, target


class _ImagesWithObjects(Dataset[tuple[Tensor, Target]]):
    def __init__(self, files: BoxFiles, masks: bool) -> None:
        self.files, self.masks = files, masks

    def read(self, index: int) -> tuple[Tensor, Tensor | None]:
        """An image and its masks, or what numbers them; an error names what does not fit."""
        files = self.files
        name, objects = files.images[index], files.objects[index]
        image = decoded(files.tree.where(name), lambda _: files.tree.open(name))
        height, width = image.shape[1:]
        if objects.size not in (None, (height, width)):
            said = "×".join(map(str, reversed(objects.size or ())))
            raise CorruptData(
                f"{files.tree.where(name)} has {width}×{height} pixels, and its annotation says "
                f"{said}: its boxes are of another image."
            )
        masks = read_masks(files, index, (height, width)) if self.masks or objects.mask else None
        return image, masks

    def __getitem__(self, index: int) -> tuple[Tensor, Target]:
        image, masks = self.read(index)
        objects = self.files.objects[index]
        boxes, labels, crowd = objects.boxes, objects.labels, objects.crowd
        target: Target = {}
        if masks is not None and objects.mask:  # numbers say where the objects are
            ids, boxes = numbered_boxes(masks)
            target["numbers"], target["ids"] = masks, ids
            labels = torch.ones(len(ids), dtype=torch.long)
            crowd = torch.zeros(len(ids), dtype=torch.bool)
        elif masks is not None:
            target["masks"] = masks
        return image, {"boxes": boxes, "labels": labels, "iscrowd": crowd, **target}


def numbered_boxes(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """The numbers above 0 of a map (H, W), and the smallest box (4,) around each.

    All at once: a search for every object by itself takes half a minute for 30,000 of them.

    >>> ids, boxes = numbered_boxes(torch.tensor([[0, 7, 7], [0, 7, 0], [2, 0, 0]]))
    >>> ids.tolist(), boxes.tolist()
    ([2, 7], [[0.0, 2.0, 1.0, 3.0], [1.0, 0.0, 3.0, 2.0]])
    """
    places = numbers.nonzero()  # (pixels, 2): row, column
    ids, object_of = numbers[tuple(places.T)].unique(return_inverse=True)
    corners = places.flip(1).float()
    index = object_of[:, None].expand(-1, 2)
    first = corners.new_full((len(ids), 2), torch.inf).scatter_reduce(0, index, corners, "amin")
    last = corners.new_zeros(len(ids), 2).scatter_reduce(0, index, corners + 1, "amax")
    return ids, torch.cat([first, last], dim=1)


def _filled(target: Target) -> Target:
    """With a mask for each object, where the objects are numbered."""
    target = dict(target)
    if "numbers" in target:
        numbers, ids = target.pop("numbers"), target.pop("ids")
        target["masks"] = numbers[None] == ids[:, None, None]
    if "masks" in target:
        target["masks"] = target["masks"].to(torch.uint8)
    return target


def box_listing(spec: Data) -> BoxListing:
    """The files of a set of objects."""
    check_pairs(spec, "boxes")
    content = content_of(spec)
    assert isinstance(content, BoxListing)
    return content


def check_objects(listing: BoxListing, masks: bool) -> None:
    """Read every image of a small set, and look for something to learn, before anything trains."""
    for part in (listing.train, listing.test):
        any_object = any(len(objects.labels) for objects in part.objects)
        numbered = any(objects.mask for objects in part.objects)
        if len(part) <= KEPT_PAIRS:
            data = _ImagesWithObjects(part, masks)
            for index in range(len(part)):
                numbers = data.read(index)[1]
                any_object |= numbered and numbers is not None and bool(numbers.any())
        elif numbered:
            continue
        if not any_object:
            name = "training" if part is listing.train else "test"
            raise CorruptData(
                f"{part.tree.place}: none of the {len(part):,} {name} images has an object: "
                "expected some to be found."
            )


def check_has_masks(spec: Data, listing: BoxListing) -> None:
    """Refuse a set whose objects have boxes alone, or masks that cannot be."""
    objects = (each for part in (listing.train, listing.test) for each in part.objects)
    if not any(each.mask or each.outlines for each in objects):
        raise OptionError(f"{spec.name} has boxes and no masks. Try task.options.masks = false.")
    check_outlines(listing.train)
    check_outlines(listing.test)


def load_boxes(spec: Data, masks: bool, device: torch.device | str) -> Sets:
    listing = box_listing(spec)
    if masks:
        check_has_masks(spec, listing)

    def loader(files: BoxFiles) -> BoxLoader:
        return BoxLoader(files, spec.size, spec.flip, masks, device)

    return pair_sets(spec, "boxes", listing, loader)
