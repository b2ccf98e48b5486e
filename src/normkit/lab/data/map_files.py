"""Files with a class for every pixel: CamVid and PASCAL VOC as published, and one's own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from normkit.lab.data.loaders import decoded, libraries
from normkit.lab.data.records import CorruptData, MapFiles, MapListing, MissingData
from normkit.lab.data.trees import IMAGE_ENDINGS, FileTree, tree_of

VOID = -100  # of a map: not labelled, neither trained on nor judged; torch's ignore_index
VOC_VOID = 255  # the index of that in a file of VOC
# of VOC's layout, to train and to test on: trainval has val in it
VOC_LISTS = (("trainval", "test"), ("train", "test"), ("train", "val"))


# ------------------------------------------------------------------ published layouts


def camvid(files: Sequence[Path]) -> MapListing:
    """CamVid as SegNet's authors keep it: train, trainannot, …; 11 classes, and 11 is void.

    Its val split is one sequence that is also half of train, so it is neither trained on nor
    judged by.
    """
    tree = tree_of(files, ("CamVid", "camvid"))

    def part(name: str) -> MapFiles:
        images = [n for n in tree.below(name, IMAGE_ENDINGS) if "/" not in n[len(name) + 1 :]]
        maps = [f"{name}annot/{Path(each).stem}.png" for each in images]
        return _paired(images, maps, tree)

    return MapListing(part("train"), part("test"), 11, 11)


def voc(files: Sequence[Path]) -> MapListing:
    """PASCAL VOC 2012 with the maps of Hariharan et al.: 21 classes, and 255 is void."""
    tree = FileTree(files[0].parent)
    parts = voc_stems(tree, "ImageSets/Segmentation", (("trainaug", "val"),))
    train, test = (_voc_maps(tree, each, "SegmentationClassAug") for each in parts)
    return MapListing(train, test, 21, VOC_VOID)


def voc_maps_folder(files: Sequence[Path]) -> MapListing:
    """Somebody's own in the layout of VOC; what is trained on says how many classes there are."""
    tree = FileTree(files[0].parent)
    parts = voc_stems(tree, "ImageSets/Segmentation")
    train, test = (_voc_maps(tree, each, "SegmentationClass") for each in parts)
    every = MapListing(train, test, VOC_VOID, VOC_VOID)
    classes = 1 + max(_highest_index(every, index) for index in range(len(train)))
    if classes < 2:
        what = "no class, all is void" if classes < 1 else "no class but 0"
        raise CorruptData(
            f"{tree.where('SegmentationClass')}: the {len(train):,} maps to train on have {what}: "
            f"expected two classes or more, from 0 on, and {VOC_VOID} for void."
        )
    return MapListing(train, test, classes, VOC_VOID)


def _highest_index(listing: MapListing, index: int) -> int:
    """The highest class of a map to train on, VOID where it has none; read again if it changed."""
    name = listing.train.tree.where(listing.train.maps[index])
    status = os.stat(name)
    key = name, status.st_size, status.st_mtime_ns
    if key not in _HIGHEST:
        _HIGHEST[key] = int(read_map(listing, listing.train, index).max())
    return _HIGHEST[key]


_HIGHEST: dict[object, int] = {}  # by file, size and time: a set is asked for several times


def voc_stems(
    tree: FileTree, folder: str, lists: Sequence[tuple[str, str]] = VOC_LISTS
) -> list[list[str]]:
    """The names of the images to train and to test on, without their endings, of VOC's lists."""
    there = (pair for pair in lists if all(f"{folder}/{each}.txt" in tree for each in pair))
    pair = next(there, None)
    if pair is None:
        expected = ", or ".join(f"{train}.txt and {test}.txt" for train, test in lists)
        raise MissingData(f"{tree.where(folder)} has no two lists: expected {expected}.")
    parts = []
    for name in (f"{folder}/{each}.txt" for each in pair):
        parts.append(tree.lines(name))
        if not parts[-1]:
            raise MissingData(f"{tree.where(name)} is empty: expected the name of an image a line.")
    return parts


def voc_image(tree: FileTree, stem: str) -> str:
    """An image of VOC's layout, whatever its ending; .jpg where it is not there."""
    endings = (".jpg", *IMAGE_ENDINGS, *(each.upper() for each in IMAGE_ENDINGS))
    names = [f"JPEGImages/{stem}{ending}" for ending in endings]
    return next((name for name in names if name in tree), names[0])


def _voc_maps(tree: FileTree, stems: Sequence[str], folder: str) -> MapFiles:
    images = [voc_image(tree, each) for each in stems]
    return _paired(images, [f"{folder}/{each}.png" for each in stems], tree)


def _paired(images: list[str], maps: list[str], tree: FileTree) -> MapFiles:
    """Every file that is listed is there."""
    tree.check_there((*images, *maps))
    return MapFiles(images, maps, tree)


# ------------------------------------------------------------------ one image and its map


def read_pair(listing: MapListing, files: MapFiles, index: int) -> tuple[Tensor, Tensor]:
    """(3, H, W) uint8 and (H, W) int16 with VOID; an error names the file that does not fit."""
    name = files.images[index]
    image = decoded(files.tree.where(name), lambda _: files.tree.open(name))
    classes = read_map(listing, files, index)
    if classes.shape != image.shape[1:]:
        raise CorruptData(
            f"{files.tree.where(files.maps[index])} has {size_of(classes)} pixels, and its image "
            f"{files.tree.where(name)} has {size_of(image)}: expected the same."
        )
    return image, classes


def read_map(listing: MapListing, files: MapFiles, index: int) -> Tensor:
    """The classes of an image; an index beyond them is an error with its place."""
    name = files.maps[index]
    where = files.tree.where(name)
    _, pillow = libraries()
    try:
        with files.tree.open(name) as content, pillow.open(content) as file:
            mode, (width, height), body = file.mode, file.size, file.tobytes()
    except (OSError, SyntaxError, ValueError) as error:
        if isinstance(error, CorruptData | FileNotFoundError):
            raise
        raise CorruptData(f"{where} cannot be read as an image: {error}.") from error
    if mode not in ("P", "L"):  # of a palette the indices are the classes, not the colours
        raise CorruptData(
            f"{where} is an image of mode {mode}, expected one with an index for each pixel."
        )
    indices = torch.frombuffer(bytearray(body), dtype=torch.uint8).view(height, width)
    wrong = (indices >= listing.classes) & (indices != listing.void)
    if wrong.any():
        row, column = (int(each[0]) for each in wrong.nonzero(as_tuple=True))
        raise CorruptData(
            f"{where} has class {int(indices[row, column])} at row {row}, column {column}: "
            f"expected 0 to {listing.classes - 1}, or {listing.void} for void."
        )
    classes = indices.to(torch.int16)
    return classes.masked_fill_(indices == listing.void, VOID)


def size_of(image: Tensor) -> str:
    """Width and height, for messages."""
    return f"{image.shape[-1]}×{image.shape[-2]}"
