"""Where the files of a data set are, and what to say where they are not."""

from __future__ import annotations

import os
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from normkit.lab.data.errors import CorruptData, MissingData
from normkit.lab.data.layouts import Layout, Source
from normkit.lab.data.records import Listing, Raw


@dataclass(frozen=True)
class Found:
    """The files of a source, verified."""

    source: Source
    layout: Layout
    files: tuple[Path, ...]

    @property
    def path(self) -> Path:
        """The archive, or the folder."""
        if len(self.files) == 1:
            return self.files[0]
        return Path(os.path.commonpath([file.parent for file in self.files]))

    def read(self) -> Raw | Listing:
        try:
            read = self.layout.read(self.files)
        except (OSError, EOFError, zlib.error, tarfile.TarError, ValueError) as error:
            if isinstance(error, CorruptData | MissingData):
                raise type(error)(f"{error} {self.source.get}") from error
            raise CorruptData(
                f"{self.path} cannot be read: {str(error).rstrip('.')}. {self.source.get}"
            ) from error
        self._count(read)
        return read

    def _count(self, read: Raw | Listing) -> None:
        expected, counts = self.source.samples, (len(read.train.labels), len(read.test.labels))
        if expected is not None and counts != expected:
            raise CorruptData(
                f"{self.path} has {counts[0]:,} and {counts[1]:,} images to train and to test on, "
                f"expected {expected[0]:,} and {expected[1]:,}. {self.source.get}"
            )


def find(source: Source, path: str | None) -> Found:
    """The first complete and healthy copy; where there is none, an error about the best one."""
    damaged: CorruptData | None = None
    partial: list[Path] = []
    roots = places(path)
    for folder in _folders(source, roots):
        for layout in source.layouts:
            for inner in layout.folders:
                here = folder / inner
                found = [file.find(here) for file in layout.files]
                files = [each for each in found if each is not None]
                if len(files) < len(found):
                    if files and not partial:
                        partial = [
                            here / file.names[0]
                            for file, each in zip(layout.files, found, strict=True)
                            if each is None
                        ]
                    continue
                try:
                    for file, each in zip(layout.files, files, strict=True):
                        file.check(each)
                except CorruptData as error:
                    damaged = damaged or error
                else:
                    return Found(source, layout, tuple(files))
    if damaged:
        raise CorruptData(f"{damaged} {source.get}") from damaged
    raise MissingData(_missing(source, roots, partial, path))


def places(path: str | None) -> list[Path]:
    """The folder that was given; else those of NORMKIT_DATA and ./data."""
    if path is not None:
        return [Path(path).expanduser()]
    said = os.environ.get("NORMKIT_DATA", "").split(os.pathsep)
    return [Path(each).expanduser() for each in said if each] + [Path("data")]


def _folders(source: Source, roots: list[Path]) -> Iterator[Path]:
    for root in roots:
        for name in (*source.folders, ""):  # a folder of its own is the better guess
            if (root / name).is_dir():
                yield root / name
        if root.is_file():  # the archive itself was given
            yield root.parent


def _missing(source: Source, roots: list[Path], partial: list[Path], path: str | None) -> str:
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
