"""Files of images with objects, as boxes or masks: BCCD, nuclei and COCO as published, and
somebody's own in the layouts of VOC and COCO."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import torch
from torch import Tensor

from normkit.core.optional_dependencies import require
from normkit.lab.data.loaders import libraries
from normkit.lab.data.map_files import voc_image, voc_stems
from normkit.lab.data.records import (
    BoxFiles,
    BoxListing,
    CorruptData,
    LeftOut,
    MissingData,
    Objects,
    WrongEntry,
)
from normkit.lab.data.trees import IMAGE_ENDINGS, FileTree, tree_of

BLOOD_CELLS = ("RBC", "WBC", "Platelets")
WHOLE = 1e-3  # pixels by which a box may leave its image: coordinates are rounded


def bccd(files: Sequence[Path]) -> BoxListing:
    """BCCD in the layout of VOC: three kinds of blood cells; trainval to train on, test to test.

    Two of its boxes have no area, and are left out.
    """
    return _voc(tree_of(files, ("BCCD",)), BLOOD_CELLS)


def voc_folder(files: Sequence[Path]) -> BoxListing:
    """Somebody's own in the layout of VOC; what is trained on says which classes there are."""
    return _voc(tree_of(files))


def _voc(tree: FileTree, classes: Sequence[str] = ()) -> BoxListing:
    parts = []
    for stems in voc_stems(tree, "ImageSets/Main"):
        read = [_voc_annotation(tree, f"Annotations/{stem}.xml") for stem in stems]
        classes = classes or sorted({name for each in read for name in each.names})
        objects = [_voc_objects(each, classes) for each in read]
        parts.append(_checked([voc_image(tree, stem) for stem in stems], objects, tree))
    train, test = parts
    return BoxListing(train, test, len(classes))


class VocAnnotation(NamedTuple):
    """What a file says about an image."""

    where: str
    size: tuple[int, int]  # height, width
    rows: list[list[float]]
    names: list[str]  # the class of each object


def _voc_annotation(tree: FileTree, name: str) -> VocAnnotation:
    where = tree.where(name)
    with tree.open(name) as file:
        try:
            root = ElementTree.fromstring(file.read())
        except ElementTree.ParseError as error:
            raise WrongEntry(f"{where} is no XML: {error}.") from error
    try:
        width, height = (int(root.findtext(f"size/{side}", "")) for side in ("width", "height"))
        rows = [
            [float(each.findtext(f"bndbox/{key}", "")) for key in ("xmin", "ymin", "xmax", "ymax")]
            for each in root.iter("object")
        ]
    except ValueError as error:
        raise WrongEntry(f"{where} lacks a number: {error}.") from error
    names = [each.findtext("name", "") for each in root.iter("object")]
    return VocAnnotation(where, (height, width), rows, names)


def _voc_objects(annotation: VocAnnotation, classes: Sequence[str]) -> Objects:
    unknown = sorted(set(annotation.names) - set(classes))
    if unknown:
        known = ", ".join(classes) or "none: no image to train on has an object"
        raise WrongEntry(
            f"{annotation.where} has an object of class {unknown[0]!r}, expected {known}."
        )
    labels = [classes.index(each) + 1 for each in annotation.names]
    return objects_of(annotation.rows, labels, annotation.size, annotation.where)


def nuclei(files: Sequence[Path]) -> BoxListing:
    """Microscope images of the Data Science Bowl 2018 with a number for each nucleus in a mask."""
    tree = tree_of(files, ("nuclei",))

    def part(name: str) -> BoxFiles:
        images = tree.below(name, IMAGE_ENDINGS)
        masks = [f"{name}-masks/{Path(each).stem}.png" for each in images]
        return _checked(images, [_by_mask(each) for each in masks], tree)

    return BoxListing(part("train"), part("val"), 1)


def _by_mask(name: str) -> Objects:
    nothing = objects_of((), (), (0, 0), name)  # until the file is read
    return replace(nothing, mask=name, size=None)


def coco(files: Sequence[Path]) -> BoxListing:
    """COCO: two files of annotations, then the two folders of their images.

    Training images without an object that is no crowd are left out: of COCO 2017 117,266 stay.
    """
    root = files[0].parent.parent
    tree = FileTree(root)
    paths = [file.relative_to(root).as_posix() for file in files]
    numbers: dict[int, int] = {}
    names: dict[int, str] = {}
    trained: set[int] = set()  # categories
    told: set[int] = set()

    def part(path: str, folder: str, training: bool) -> BoxFiles:
        content = _coco_file(tree, path)
        for each in sorted(content["categories"], key=lambda category: category["id"]):
            number, name = each["id"], str(each.get("name", ""))
            if training:
                numbers.setdefault(number, len(numbers) + 1)
            if names.setdefault(number, name) != name or number not in numbers:
                lists = f"lists {names[number]!r}" if number in numbers else "does not list it"
                raise WrongEntry(
                    f"{tree.where(path)} lists category {number} ({name!r}), and "
                    f"{tree.where(paths[0])} {lists}: expected the same categories to train and "
                    "to test on."
                )
        by_image: dict[int, list[dict[str, Any]]] = {}
        listed = {image["id"] for image in content["images"]}
        for entry, each in enumerate(content["annotations"]):
            if each["image_id"] not in listed:
                raise WrongEntry(
                    f"{tree.where(path)}: entry {entry} of annotations is of image "
                    f"{each['image_id']}, which is not listed."
                )
            if not (training and each.get("iscrowd")):
                by_image.setdefault(each["image_id"], []).append(each)
        images, objects = [], []
        for image in sorted(content["images"], key=lambda image: image["id"]):
            own = by_image.get(image["id"], [])
            if training and not own:
                continue
            where = f"{tree.where(path)}, image {image['id']}"
            unknown = [each["category_id"] for each in own if each["category_id"] not in numbers]
            if unknown:
                raise WrongEntry(f"{where} has category {unknown[0]}, which is not listed.")
            boxes = [(x, y, x + w, y + h) for x, y, w, h in (each["bbox"] for each in own)]
            labels = [numbers[each["category_id"]] for each in own]
            if training:
                trained.update(each["category_id"] for each in own)
            for number in sorted({each["category_id"] for each in own} - trained - told):
                told.add(number)
                warnings.warn(
                    f"{where} has an object of category {number} ({names[number]!r}), of which "
                    f"{tree.where(paths[0])} has none: it cannot be learned.",
                    LeftOut,
                    stacklevel=2,
                )
            outlines = [each.get("segmentation") for each in own]
            crowd = [bool(each.get("iscrowd")) for each in own]
            size = image["height"], image["width"]
            objects.append(objects_of(boxes, labels, size, where, outlines, crowd))
            images.append(f"{folder}/{image['file_name']}")
        return _checked(images, objects, tree)

    train = part(paths[0], paths[2], True)
    return BoxListing(train, part(paths[1], paths[3], False), len(numbers))


COCO_KEYS: dict[str, dict[str, Any]] = {
    "categories": {"id": int},
    "images": {"id": int, "file_name": str, "height": int, "width": int},
    "annotations": {"image_id": int, "category_id": int, "bbox": list},
}


def _coco_file(tree: FileTree, path: str) -> dict[str, Any]:
    """The content of an annotation file, in which everything that is read is there."""
    where = tree.where(path)
    with tree.open(path) as file:
        try:
            content = json.load(file)
        except ValueError as error:
            raise WrongEntry(f"{where} is no JSON: {error}.") from error
    for part, keys in COCO_KEYS.items():
        entries = content.get(part) if isinstance(content, dict) else None
        if not isinstance(entries, list):
            raise WrongEntry(f"{where} has no list of {part}: expected COCO's instances.")
        for number, entry in enumerate(entries):
            for key, kind in keys.items():
                if not isinstance(entry, dict) or not isinstance(entry.get(key), kind):
                    raise WrongEntry(
                        f"{where}: entry {number} of {part} lacks {key!r}: {str(entry)[:80]}."
                    )
            box = entry.get("bbox", ()) if part == "annotations" else (0, 0, 0, 0)
            if len(box) != 4 or not all(isinstance(each, int | float) for each in box):
                raise WrongEntry(
                    f"{where}, image {entry['image_id']}: entry {number} of annotations has the "
                    f"box {box}, expected left, top, width and height."
                )
    return content


def check_outlines(files: BoxFiles) -> None:
    """Refuse COCO's objects without a mask, or with one that is not of the image's size."""
    for image, objects in zip(files.images, files.objects, strict=True):
        for number, outline in enumerate(objects.outlines or ()):
            wrong = _outline_fault(outline, objects.size)
            if wrong:
                raise WrongEntry(f"{files.tree.where(image)}: object {number + 1} {wrong}.")


def _outline_fault(outline: Any, size: tuple[int, int] | None) -> str:
    if isinstance(outline, dict) and "counts" in outline:
        own, counts = outline.get("size"), outline["counts"]
        if not isinstance(own, list) or len(own) != 2:
            return f"has a mask of size {own}, expected [HEIGHT, WIDTH]"
        if size is not None and tuple(own) != size:
            return f"has a mask of {own[1]}×{own[0]} pixels, and the image {size[1]}×{size[0]}"
        if not isinstance(counts, list):
            return "" if isinstance(counts, str) else f"has runs {counts!r}, expected a list"
        if not all(isinstance(run, int) and run >= 0 for run in counts):
            return f"has runs {str(counts)[:40]}, expected whole numbers from 0 on"
        if sum(counts) != own[0] * own[1]:
            return f"has runs of {sum(counts)} pixels, expected {own[1]}×{own[0]}"
        return ""
    if isinstance(outline, list) and outline and all(isinstance(p, list) for p in outline):
        for polygon in outline:
            if len(polygon) < 6 or len(polygon) % 2:
                return f"has a polygon of {len(polygon)} numbers, expected pairs, three or more"
            if not all(isinstance(x, int | float) and math.isfinite(x) for x in polygon):
                return f"has a polygon {str(polygon)[:40]}, expected finite numbers"
        return ""
    return "has no segmentation, which masks are made of: try task.options.masks = false"


def objects_of(
    boxes: Sequence[Sequence[float]],
    labels: Sequence[int],
    size: tuple[int, int],
    where: str,
    outlines: Sequence[Any] = (),
    crowd: Sequence[bool] = (),
) -> Objects:
    """Checked: a box outside its image is an error, one without area is left out with a warning,
    which a check of the lab shows as a caution."""
    kept = []
    height, width = size
    for number, (left, top, right, bottom) in enumerate(boxes):
        if not all(map(math.isfinite, (left, top, right, bottom))):
            raise WrongEntry(f"{where}: box {number + 1} is not finite.")
        if min(left, top) < -WHOLE or right > width + WHOLE or bottom > height + WHOLE:
            raise WrongEntry(
                f"{where}: box {number + 1}, {left:g} to {right:g} × {top:g} to {bottom:g}, leaves "
                f"the image of {width}×{height} pixels."
            )
        if right > left and bottom > top:
            kept.append(number)
        else:
            turned = right < left or bottom < top
            what = "ends before it begins" if turned else "has no area"
            warnings.warn(
                f"{where}: box {number + 1}, {left:g} to {right:g} × {top:g} to {bottom:g}, {what} "
                "and is left out.",
                LeftOut,
                stacklevel=3,
            )
    return Objects(
        torch.tensor([boxes[i] for i in kept], dtype=torch.float32).view(-1, 4),
        torch.tensor([labels[i] for i in kept], dtype=torch.long),
        torch.tensor([bool(crowd) and crowd[i] for i in kept], dtype=torch.bool),
        outlines=[outlines[i] for i in kept] if outlines else None,
        size=size,
    )


def _checked(images: list[str], objects: list[Objects], tree: FileTree) -> BoxFiles:
    if not images:
        raise MissingData(f"{tree.place} lists no images: expected some to train and test on.")
    tree.check_there((*images, *(each.mask for each in objects if each.mask)))
    return BoxFiles(images, objects, tree)


def read_masks(files: BoxFiles, index: int, size: tuple[int, int]) -> Tensor | None:
    """A number for each object and pixel (H, W), or masks (n, H, W) of COCO's outlines; or None."""
    objects, tree = files.objects[index], files.tree
    if objects.mask:
        return _numbered(tree, objects.mask, size, files.images[index])
    if objects.outlines is None:
        return None if len(objects.labels) else torch.zeros(0, *size, dtype=torch.bool)
    masks = [torch.zeros(0, *size, dtype=torch.bool)]
    for number, outline in enumerate(objects.outlines, 1):
        try:
            masks.append(_filled(outline, size)[None])
        except (ValueError, TypeError, RuntimeError) as error:
            raise WrongEntry(
                f"{tree.where(files.images[index])}: the mask of object {number} cannot be "
                f"decoded: {str(error).rstrip('.')}."
            ) from error
    return torch.cat(masks)


def _numbered(tree: FileTree, name: str, size: tuple[int, int], image: str) -> Tensor:
    where = tree.where(name)
    _, pillow = libraries()
    try:
        with tree.open(name) as content, pillow.open(content) as file:
            mode, (width, height) = file.mode, file.size
            numbers = file.convert("I").tobytes()
    except (OSError, SyntaxError, ValueError) as error:
        if isinstance(error, CorruptData | MissingData):
            raise
        raise WrongEntry(f"{where} cannot be read as an image: {error}.") from error
    if mode not in ("P", "L", "I", "I;16"):
        raise WrongEntry(f"{where} is an image of mode {mode}, expected a number for each pixel.")
    if (height, width) != size:
        raise WrongEntry(
            f"{where} has {width}×{height} pixels, and its image {tree.where(image)} has "
            f"{size[1]}×{size[0]}: expected the same."
        )
    return torch.frombuffer(bytearray(numbers), dtype=torch.int32).view(height, width)


def _filled(outline: Any, size: tuple[int, int]) -> Tensor:
    """COCO's polygons, or runs of pixels, as a mask."""
    coding = require("faster_coco_eval.core.mask", "tasks", "masks of COCO")
    height, width = size
    if isinstance(outline, list):
        coded = coding.merge(coding.frPyObjects(outline, height, width))
    elif isinstance(outline.get("counts"), list):
        coded = coding.frPyObjects(outline, height, width)
    else:
        coded = outline
    mask = torch.as_tensor(coding.decode(coded)).bool()
    if mask.shape != size:
        raise ValueError(f"it has {mask.shape[-1]}×{mask.shape[0]} pixels")
    return mask
