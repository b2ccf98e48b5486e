"""Somebody's own images: the forms in which they may lie, and what identifies them.

The fingerprint of a set is part of the identity of the runs on it, so that images that are added,
removed, renamed or moved to another class are trained on anew, and a copy elsewhere is not.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path

from normkit.lab.data.arrow_tables import read_tables, table_files
from normkit.lab.data.csv_lists import csv_files, read_csv
from normkit.lab.data.files import find
from normkit.lab.data.records import CorruptData, Listing, MissingData
from normkit.lab.data.sources import FOLDER
from normkit.lab.data.tar_shards import read_tar, tar_files
from normkit.lab.experiment import Data

PIECE = 1 << 20  # bytes of a large file, at its beginning and at its end, that are looked at


@dataclass(frozen=True)
class OwnFormat:
    """A form in which people keep their images."""

    files: Callable[[Path], list[Path]]  # those that say which images there are
    read: Callable[[Path, Data], Listing]
    holds_images: bool = True  # in these files; else each is a file of its own


def _folders(path: Path) -> list[Path]:
    return list(find(FOLDER, str(path)).files)


def _read_folders(path: Path, spec: Data) -> Listing:
    content = find(FOLDER, str(path)).read()
    assert isinstance(content, Listing)
    return content


FORMATS = {
    "csv": OwnFormat(csv_files, read_csv, holds_images=False),
    "folder": OwnFormat(_folders, _read_folders, holds_images=False),
    "huggingface": OwnFormat(lambda path: [*chain(*table_files(path))], read_tables),
    "webdataset": OwnFormat(lambda path: [*chain(*tar_files(path))], read_tar),
}


def own_files(spec: Data) -> list[Path]:
    """The files of a set, or an error that says what is missing."""
    return FORMATS[spec.name].files(_path(spec))


def own_listing(spec: Data) -> Listing:
    """The images and labels of a set, as it lies there now."""
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


_LISTED: dict[object, Listing] = {}  # the last one: a set is asked for several times in a row


def _listed(name: str, path: Path, image: str | None, label: str | None, stamps: object) -> Listing:
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
        for each in chain(content.train.paths, content.test.paths):
            add(each)
    return digest.hexdigest()[:16]


def _ends(file: Path) -> bytes:
    with file.open("rb") as content:
        first = content.read(PIECE)
        content.seek(max(0, file.stat().st_size - PIECE))
        return first + content.read(PIECE)
