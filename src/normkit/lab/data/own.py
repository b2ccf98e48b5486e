"""Somebody's own images: the forms in which they may lie, and what identifies them.

The fingerprint of a set is part of the identity of the runs on it, so that images that are added,
removed, renamed or moved to another class are trained on anew, and a copy elsewhere is not.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path

from normkit.lab.data import box_files, clips, folders, map_files
from normkit.lab.data.arrow_tables import read_tables, table_files
from normkit.lab.data.csv_lists import csv_files, read_csv
from normkit.lab.data.files import File, FileLayout, Folder, PublishedSet, find
from normkit.lab.data.records import (
    BoxFiles,
    BoxListing,
    Content,
    CorruptData,
    DomainListing,
    Files,
    Listing,
    MapFiles,
    MapListing,
    MissingData,
)
from normkit.lab.data.sources import FOLDER
from normkit.lab.data.tar_shards import read_tar, tar_files
from normkit.lab.experiment import Data

OwnContent = Listing | MapListing | BoxListing | DomainListing
PIECE = 1 << 20  # bytes of a large file, at its beginning and at its end, that are looked at


@dataclass(frozen=True)
class OwnFormat:
    """A form in which people keep their images."""

    files: Callable[[Path], list[Path]]  # those that say which images there are
    read: Callable[[Path, Data], OwnContent]
    holds_images: bool = True  # in these files; else each is a file of its own
    kind: str = "labels"  # what belongs to an image: see loading.KINDS


# ------------------------------------------------------------------ layouts of published sets


def _layout(
    name: str,
    kind: str,
    read: Callable[[Sequence[Path]], Content],
    expected: str,
    *files: tuple[File | Folder, ...],
) -> PublishedSet:
    """The layout of a published set, with any number of images and classes."""
    layouts = tuple(FileLayout(each, read) for each in files)
    return PublishedSet(name, layouts, (), f"Expected in data.path {expected}.", kind=kind)


COCO_FOLDER = _layout(
    "coco-folder",
    "boxes",
    box_files.coco,
    "annotations/instances_train.json and instances_test.json, and the folders of their images, "
    "train and test; val and 2017 as in COCO will do",
    *(
        (
            File((f"annotations/instances_{train}.json",)),
            File((f"annotations/instances_{test}.json",)),
            Folder((train, f"images/{train}")),
            Folder((test, f"images/{test}")),
        )
        for train, test in (("train", "test"), ("train", "val"), ("train2017", "val2017"))
    ),
)
VOC_FOLDER = _layout(
    "voc-folder",
    "boxes",
    box_files.voc_folder,
    "JPEGImages/NAME.jpg, Annotations/NAME.xml, and ImageSets/Main/train.txt and test.txt with a "
    "NAME a line",
    tuple(Folder((name,)) for name in ("Annotations", "JPEGImages", "ImageSets/Main")),
)
VOC_MAPS_FOLDER = _layout(
    "voc-segmentation-folder",
    "maps",
    map_files.voc_maps_folder,
    "JPEGImages/NAME.jpg, SegmentationClass/NAME.png with an index for each pixel, and "
    "ImageSets/Segmentation/train.txt and test.txt with a NAME a line",
    tuple(Folder((n,)) for n in ("JPEGImages", "SegmentationClass", "ImageSets/Segmentation")),
)
FRAMES_FOLDER = _layout(
    "frames-folder",
    "clips",
    clips.frames_folder,
    "frames/FOLDER/00001.jpg, 00002.jpg, …, and train.txt and test.txt with FOLDER FRAMES LABEL "
    "a line",
    (
        File(("train.txt", "train_videofolder.txt")),
        File(("test.txt", "val.txt", "val_videofolder.txt")),
        Folder(("frames", "20bn-something-something-v1")),
    ),
)
NEW_CLASSES = _layout(
    "new-classes-folder",
    "episodes",
    folders.new_classes,
    "train/CLASS/NAME.jpg and, of other classes, test/CLASS/NAME.jpg",
    FOLDER.layouts[0].files,
)
DOMAINS_FOLDER = _layout(
    "domains-folder",
    "domains",
    folders.domains_folder,
    "DOMAIN/CLASS/NAME.jpg",
    (Folder(("",)),),
)


def _laid_out(source: PublishedSet) -> OwnFormat:
    def files(path: Path) -> list[Path]:
        return list(find(source, str(path)).files)

    def read(path: Path, spec: Data) -> OwnContent:
        content = find(source, str(path)).read()
        assert isinstance(content, OwnContent)
        return content

    return OwnFormat(files, read, holds_images=False, kind=source.kind)


LAYOUTS = (
    *(FOLDER, NEW_CLASSES, DOMAINS_FOLDER, COCO_FOLDER, VOC_FOLDER, VOC_MAPS_FOLDER),
    FRAMES_FOLDER,
)
FORMATS = {
    **{source.name: _laid_out(source) for source in LAYOUTS},
    "csv": OwnFormat(csv_files, read_csv, holds_images=False),
    "huggingface": OwnFormat(lambda path: [*chain(*table_files(path))], read_tables),
    "webdataset": OwnFormat(lambda path: [*chain(*tar_files(path))], read_tar),
}


def own_files(spec: Data) -> list[Path]:
    """The files of a set, or an error that says what is missing."""
    return FORMATS[spec.name].files(_path(spec))


def own_listing(spec: Data) -> OwnContent:
    """What a set has, as it lies there now."""
    if spec.fingerprint is not None and (now := fingerprint(spec)) != spec.fingerprint:
        raise CorruptData(
            f"{spec.path} is not the data of data.fingerprint: it is {now!r}, and the experiment "
            f"says {spec.fingerprint!r}. Try the data that it means, or leave the key out."
        )
    return _listed(spec.name, _path(spec), spec.image, spec.label, _stamps(own_files(spec)))


def fingerprint(spec: Data) -> str:
    """16 characters that change with the names, sizes and labels of the images.

    Lists are read as a whole, archives and tables at their ends, image files not at all. Read once
    a process: the runs of a sweep are of one set.
    """
    return _fingerprint(spec.name, _path(spec), spec.image, spec.label)


def identity(spec: Data) -> str:
    """The fingerprint that the experiment states, or that of the data."""
    if spec.fingerprint is not None:
        return spec.fingerprint
    try:
        return fingerprint(spec)
    except MissingData as error:
        raise MissingData(
            f"{error} Runs on images of your own are known by these. To look at results without "
            "them, put data.fingerprint in the file, as normkit lab check prints it where they are."
        ) from error


def _path(spec: Data) -> Path:
    return Path(spec.path or ".").expanduser()


def _stamps(files: Iterable[Path]) -> tuple[tuple[str, int, int], ...]:
    return tuple((str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in files)


_LISTED: dict[object, OwnContent] = {}  # the last one: a set is asked for several times in a row


def _listed(
    name: str, path: Path, image: str | None, label: str | None, stamps: object
) -> OwnContent:
    key = (name, path, image, label, stamps)
    format = FORMATS[name]
    if key not in _LISTED or not format.holds_images:  # files come and go beside their list
        _LISTED.clear()
        _LISTED[key] = format.read(path, Data(name, path=str(path), image=image, label=label))
    return _LISTED[key]


@cache
def _fingerprint(name: str, path: Path, image: str | None, label: str | None) -> str:
    format, files = FORMATS[name], FORMATS[name].files(path)
    digest = hashlib.sha256()
    base = path if path.is_dir() else path.parent

    def add(file: str | Path) -> None:
        digest.update(f"{os.path.relpath(file, base)}\n{os.path.getsize(file)}\n".encode())

    for file in files:
        if file.is_file():
            add(file)
            digest.update(_ends(file) if format.holds_images else file.read_bytes())
    if not format.holds_images:
        content = _listed(name, path, image, label, _stamps(files))
        for part in (content.train, content.test):
            for each in _images(part, base):
                add(each)
            for written in _labels(part):
                digest.update(written)
    return digest.hexdigest()[:16]


def _images(part: object, base: Path) -> Iterable[str]:
    """Files that are known by their names and sizes."""
    if isinstance(part, clips.ClipFiles):
        return chain(*map(part.frame_files, range(len(part))))
    if isinstance(part, Files):
        return part.paths
    if isinstance(part, list):  # of domains
        return (os.path.join(base, name) for name in part)
    assert isinstance(part, BoxFiles | MapFiles)
    return map(part.tree.where, part.images)


def _labels(part: object) -> Iterator[bytes]:
    """What is learned of them, where it stands neither in their paths nor in the files of a set."""
    if isinstance(part, MapFiles):
        for name in part.maps:
            yield Path(part.tree.where(name)).read_bytes()
    elif isinstance(part, BoxFiles):
        for each in part.objects:
            yield f"{each.boxes.tolist()} {each.labels.tolist()}\n".encode()


def _ends(file: Path) -> bytes:
    with file.open("rb") as content:
        first = content.read(PIECE)
        content.seek(max(0, file.stat().st_size - PIECE))
        return first + content.read(PIECE)
