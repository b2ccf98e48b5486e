"""The files of a published set: in which layouts people keep them, where they are, and whether they
are what was published.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from normkit.core.atomic_write import write_text
from normkit.lab.data.records import Content, CorruptData, MissingData, WrongEntry


@dataclass(frozen=True)
class File:
    """A published file: any of its names, and its checksum where there is one."""

    names: tuple[str, ...]
    md5: str | None = None
    size: int | None = None
    packed: bool = False  # the checksum is of the content, which may be compressed

    def find(self, folder: Path) -> Path | None:
        return next((folder / name for name in self.names if (folder / name).is_file()), None)

    def check(self, path: Path) -> None:
        if self.md5 is not None or self.packed:
            verify(path, self.md5, self.size, self.packed)
        elif self.size is not None and path.stat().st_size != self.size:
            raise CorruptData(
                f"{path} is not as published: it has {path.stat().st_size:,} bytes, "
                f"expected {self.size:,}."
            )


@dataclass(frozen=True)
class Folder:
    """A folder full of images: too many to verify."""

    names: tuple[str, ...]

    def find(self, folder: Path) -> Path | None:
        return next((folder / name for name in self.names if (folder / name).is_dir()), None)

    def check(self, path: Path) -> None:
        if not any(path.iterdir()):
            raise CorruptData(f"{path} is empty.")


@dataclass(frozen=True)
class FileLayout:
    """One of the forms in which people keep a set: files in a folder, and how they are read."""

    files: tuple[File | Folder, ...]
    read: Callable[[Sequence[Path]], Content]
    folders: tuple[str, ...] = ("",)  # below a place to look; "": the place itself


@dataclass(frozen=True)
class PublishedSet:
    """A published data set."""

    name: str
    layouts: tuple[FileLayout, ...]
    folders: tuple[str, ...]  # people's names for its folder
    get: str  # how a person comes by it
    classes: int | None = None  # None: of somebody's own images
    samples: tuple[int, int] | None = None  # to train on, to test on
    kind: str = "labels"  # what belongs to an image: see loading.KINDS
    own: str = ""  # the name of somebody's own data in this layout


@dataclass(frozen=True)
class DataFiles:
    """The files of a source, verified."""

    source: PublishedSet
    layout: FileLayout
    files: tuple[Path, ...]

    @property
    def path(self) -> Path:
        """The archive, or the folder."""
        if len(self.files) == 1:
            return self.files[0]
        return Path(os.path.commonpath([file.parent for file in self.files]))

    def read(self) -> Content:
        try:
            content = self.layout.read(self.files)
        except (OSError, EOFError, zlib.error, tarfile.TarError, ValueError) as error:
            if isinstance(error, WrongEntry):
                raise
            if isinstance(error, CorruptData | MissingData):
                raise type(error)(f"{error} {self.source.get}") from error
            raise CorruptData(
                f"{self.path} cannot be read: {str(error).rstrip('.')}. {self.source.get}"
            ) from error
        counts = len(content.train), len(content.test)
        expected = self.source.samples
        if expected is not None and counts != expected:
            raise CorruptData(
                f"{self.path} has {counts[0]:,} and {counts[1]:,} images to train and to test on, "
                f"expected {expected[0]:,} and {expected[1]:,}. {self.source.get}"
                + f' Of your own in this layout: data.name = "{self.source.own}".'
                * bool(self.source.own)
            )
        return content


def find(source: PublishedSet, path: str | None) -> DataFiles:
    """The first complete and healthy copy; where there is none, an error about the best one."""
    damaged: CorruptData | None = None
    partial: list[Path] = []
    roots = [Path("data")]
    if path is not None:
        roots = [Path(path).expanduser()]
    elif folders := os.environ.get("NORMKIT_DATA"):
        roots = [Path(each).expanduser() for each in folders.split(os.pathsep) if each] + roots
    for folder in _folders(source, roots):
        for layout in source.layouts:
            for inner in layout.folders:
                here = folder / inner
                paths = {file: file.find(here) for file in layout.files}
                files = [each for each in paths.values() if each is not None]
                if len(files) < len(paths):
                    if files and not partial:
                        partial = [here / f.names[0] for f, each in paths.items() if each is None]
                    continue
                try:
                    for file, each in zip(layout.files, files, strict=True):
                        file.check(each)
                except CorruptData as error:
                    damaged = damaged or error
                else:
                    return DataFiles(source, layout, tuple(files))
    if damaged:
        raise CorruptData(f"{damaged} {source.get}") from damaged
    raise MissingData(_missing(source, roots, partial, path))


def _folders(source: PublishedSet, roots: list[Path]) -> Iterator[Path]:
    for root in roots:
        for name in (*source.folders, ""):  # a folder of its own is the better guess
            if (root / name).is_dir():
                yield root / name
        if root.is_file():  # the archive itself was given
            yield root.parent


def _missing(source: PublishedSet, roots: list[Path], partial: list[Path], path: str | None) -> str:
    looked = ", ".join(map(str, roots))
    if partial:
        what = f"{source.name} is incomplete: {', '.join(map(str, partial))} missing."
    else:
        what = f"{source.name} was not found in {looked}."
    if path is not None:
        where = "The path was given by the experiment (data.path)."
    elif not os.environ.get("NORMKIT_DATA"):
        where = "NORMKIT_DATA is not set: let it name the folder that holds your data sets."
    else:
        where = f"NORMKIT_DATA is {os.environ['NORMKIT_DATA']!r}."
    return f"{what} {where} {source.get}"


def verify(file: Path, md5: str | None, size: int | None = None, packed: bool = False) -> None:
    """Raises CorruptData unless the file, or with ``packed`` what is compressed in it, has ``md5``.

    Without one it suffices that the file can be read. ``size`` is of the file itself, and only
    makes the message clearer. A file is checked once: one that has not changed is believed.
    """
    status = file.stat()
    stamp: list[object] = [status.st_size, status.st_mtime_ns, md5]
    key = str(file.resolve())
    if _verified().get(key) == stamp:
        return
    try:
        actual = checksum(file, packed)
    except (OSError, EOFError, zlib.error) as error:
        raise CorruptData(f"{file} cannot be read: {str(error).rstrip('.')}.") from error
    if md5 is not None and actual != md5:
        difference = f"its MD5 is {actual}, that of the published file {md5}"
        if size is not None and size != status.st_size:
            wrong = f"{size - status.st_size:,} fewer" if status.st_size < size else ""
            wrong = wrong or f"{status.st_size - size:,} more"
            difference = f"it has {status.st_size:,} bytes, {wrong} than the published file"
        raise CorruptData(f"{file} is not as published: {difference}.")
    try:
        write_text(_cache_file(), json.dumps({**_verified(), key: stamp}, indent=0))
    except (OSError, RuntimeError):
        return  # nowhere to remember it: it will be verified again


def checksum(file: Path, packed: bool = False) -> str:
    """The MD5 of a file, or of what is compressed in it, if it is compressed."""
    with file.open("rb") as plain:
        compressed = packed and plain.read(2) == b"\x1f\x8b"
    with gzip.open(file, "rb") if compressed else file.open("rb") as content:
        digest = hashlib.file_digest(content, partial(hashlib.md5, usedforsecurity=False))
    return digest.hexdigest()


def _cache_file() -> Path:
    """Of this user; whoever can write it could as well change the data."""
    given = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA")
    return (Path(given) if given else Path.home() / ".cache") / "normkit" / "verified.json"


def _verified() -> dict[str, list[object]]:
    try:
        verified = json.loads(_cache_file().read_text(encoding="utf-8"))
    except (OSError, ValueError, RuntimeError):  # none yet, damaged, or no home
        return {}
    return verified if isinstance(verified, dict) else {}
