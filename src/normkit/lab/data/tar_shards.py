"""WebDataset shards: tar archives of images with their labels beside them.

    train-000.tar, train-001.tar, …, test-000.tar        or train/*.tar and test/*.tar
        0001.jpg  0001.cls                               a class's number or name
        0002.jpg  0002.json                              {"label": 3}

Archives are read in place: their heads once, and then any image by its position. So samples are
shuffled as those of any other set, and a run goes on in the middle of an epoch.
"""

from __future__ import annotations

import io
import json
import os
import tarfile
from pathlib import Path
from typing import Any, BinaryIO

from normkit.lab.data.classes import TEST_NAMES, LabelledImages, listing
from normkit.lab.data.records import CorruptData, Listing, MissingData
from normkit.lab.data.trees import IMAGE_ENDINGS
from normkit.lab.experiment import Data

EXPECTED = "Expected train-000.tar, … and test-000.tar, …, or folders train and test of them."
LABEL_KEYS = ("label", "cls", "class")  # of a json entry

Extent = tuple[str, int, int]  # archive, first byte, bytes


def tar_files(path: Path) -> list[list[Path]]:
    """The archives to train on, and those to test on."""
    if not path.is_dir():
        raise MissingData(f"{path} is not a folder. {EXPECTED}")
    parts = []
    for names in (("train",), TEST_NAMES):
        found = (sorted([*path.glob(f"{n}*.tar"), *path.glob(f"{n}/*.tar")]) for n in names)
        files = next(filter(None, found), [])
        if not files:
            packed = [*path.glob(f"{names[0]}*.tar.*"), *path.glob(f"{names[0]}*/*.tar.*")]
            hint = f" {packed[0].name} is compressed: unpack it with gunzip." if packed else ""
            raise MissingData(f"{path} has no shards to {names[0]} on.{hint} {EXPECTED}")
        parts.append(files)
    return parts


def read_tar(path: Path, spec: Data) -> Listing:
    train, test = (_part(path, files, spec) for files in tar_files(path))
    return listing(train, test)


class Shards:
    """Opens an image that lies in an archive."""

    def __init__(self) -> None:
        self.extents: dict[str, Extent] = {}

    def __call__(self, path: str) -> BinaryIO:
        return io.BytesIO(content(self.extents[path]))


def content(extent: Extent) -> bytes:
    file, first, size = extent
    with open(file, "rb") as archive:
        archive.seek(first)
        return archive.read(size)


def _part(path: Path, files: list[Path], spec: Data) -> LabelledImages:
    shards = Shards()
    images = LabelledImages(str(path), unit="sample", open=shards)
    for file in files:
        for key, entries in _samples(file).items():
            where = f"{file}: {key}"
            pictures = [ending for ending in entries if f".{ending}" in IMAGE_ENDINGS]
            if len(pictures) != 1:
                what = ", ".join(entries)
                raise CorruptData(f"{where} has {what}, expected one image and its label.")
            name = f"{where}.{pictures[0]}"
            shards.extents[name] = entries[pictures[0]]
            images.add(name, _label(where, entries, spec), len(images.paths) + 1)
    return images


def _samples(file: Path) -> dict[str, dict[str, Extent]]:
    """By the name up to its first dot: the entries that belong together, by their ending."""
    samples: dict[str, dict[str, Extent]] = {}
    size = os.path.getsize(file)
    try:
        with tarfile.open(file, "r:") as archive:
            for member in archive:
                if not member.isfile():
                    continue
                folder, _, name = member.name.rpartition("/")
                stem, _, ending = name.partition(".")
                key = f"{folder}/{stem}" if folder else stem
                if member.offset_data + member.size > size:
                    raise CorruptData(f"{file} ends in the middle of {member.name}.")
                extent = (str(file), member.offset_data, member.size)
                samples.setdefault(key, {})[ending.lower()] = extent
    except tarfile.TarError as error:
        raise CorruptData(f"{file} cannot be read as a tar archive: {error}.") from error
    return samples


def _label(where: str, entries: dict[str, Extent], spec: Data) -> str:
    if "cls" in entries:
        label = content(entries["cls"]).decode(errors="replace").strip()
    elif "json" in entries:
        label = _json_label(where, content(entries["json"]), spec)
    else:
        raise CorruptData(
            f"{where} has {', '.join(entries)}, and no label: expected .cls, or .json with a label."
        )
    if not label:
        raise CorruptData(f"{where}: the label is empty.")
    return label


def _json_label(where: str, text: bytes, spec: Data) -> str:
    try:
        table: Any = json.loads(text)
    except ValueError as error:
        raise CorruptData(f"{where}.json cannot be read: {error}.") from error
    keys = (spec.label,) if spec.label is not None else LABEL_KEYS
    label = next((table[k] for k in keys if k in table), None) if isinstance(table, dict) else None
    if not isinstance(label, str | int):
        raise CorruptData(
            f"{where}.json has no {' or '.join(filter(None, keys))} that is a number or a name. "
            'Try data.label = "KEY".'
        )
    return str(label)
