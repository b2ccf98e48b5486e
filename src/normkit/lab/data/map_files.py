"""Files with a class for every pixel: CamVid and PASCAL VOC, as they are published."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from normkit.lab.data.loaders import decoded, libraries
from normkit.lab.data.records import CorruptData, MapFiles, MapListing, MissingData
from normkit.lab.data.trees import FileTree, tree_of

VOID = -100  # of a map: not labelled, neither trained on nor judged; torch's ignore_index
IMAGE_ENDINGS = (".webp", ".png", ".jpg", ".jpeg")


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
    devkit = FileTree(files[0].parent, ())

    def part(name: str) -> MapFiles:
        stems = devkit.lines(f"ImageSets/Segmentation/{name}.txt")
        folder = "SegmentationClassAug"
        return _paired(
            [f"JPEGImages/{each}.jpg" for each in stems],
            [f"{folder}/{each}.png" for each in stems],
            devkit,
        )

    return MapListing(part("trainaug"), part("val"), 21, 255)


def _paired(images: list[str], maps: list[str], tree: FileTree) -> MapFiles:
    """Every file that is listed is there."""
    missing = next((name for name in (*images, *maps) if name not in tree), None)
    if missing is not None:
        raise MissingData(f"{tree.where(missing)} is listed, but is not there.")
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
