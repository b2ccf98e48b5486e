"""A folder of files, or a zip archive of one that is read in place."""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

from normkit.lab.data.records import CorruptData, MissingData

IMAGE_ENDINGS = (".webp", ".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff")


class FileTree:
    """The files below a place, by their paths with slashes.

    People pack a folder with its own name inside or without it: ``tops`` are the names to look
    for, and whichever is there is left away.
    """

    def __init__(self, place: Path, tops: Iterable[str] = ()) -> None:
        self.place, self.packed = str(place), place.is_file()
        self._archive: zipfile.ZipFile | None = None
        self._opened_by = 0  # process
        if self.packed:
            names = [info.filename for info in self._zip().infolist() if not info.is_dir()]
        else:
            names = [
                os.path.relpath(os.path.join(folder, name), place).replace(os.sep, "/")
                for folder, _, files in os.walk(place)
                for name in files
            ]
        prefixes = (f"{top}/" for top in tops)
        self.top = next((p for p in prefixes if any(n.startswith(p) for n in names)), "")
        own = (name.removeprefix(self.top) for name in names if name.startswith(self.top))
        self.names = sorted(own)  # every machine numbers the samples alike
        self._known = frozenset(self.names)

    def below(self, folder: str, endings: Iterable[str] = ("",)) -> list[str]:
        """The files of a folder, and of those in it; an error if there is none."""
        wanted = tuple(endings)
        found = [n for n in self.names if n.startswith(f"{folder}/") and n.lower().endswith(wanted)]
        if not found:
            raise MissingData(f"{self.where(folder)} has no files ({', '.join(wanted)}).")
        return found

    def __contains__(self, name: object) -> bool:
        return name in self._known

    def check_there(self, names: Iterable[str]) -> None:
        """A missing file is told with the place where it should be."""
        missing = next((name for name in names if name not in self._known), None)
        if missing is not None:
            raise MissingData(f"{self.where(missing)} is listed, but is not there.")

    def open(self, name: str) -> BinaryIO:
        """The content of a file."""
        self.check_there([name])
        if self.packed:
            return io.BytesIO(self._zip().read(self.top + name))
        return open(os.path.join(self.place, self.top + name), "rb")

    def where(self, name: str) -> str:
        """A file as errors call it."""
        return f"{self.place}/{self.top}{name}"

    def lines(self, name: str) -> list[str]:
        """Of a text file, without empty ones."""
        with self.open(name) as file:
            text = file.read().decode("utf-8-sig")
        return [line.strip() for line in text.splitlines() if line.strip()]

    def _zip(self) -> zipfile.ZipFile:
        """Worker processes open the archive themselves, forked ones, too: a file that two have
        open from one opening is read from one place at a time."""
        if self._archive is None or self._opened_by != os.getpid():
            try:
                self._archive, self._opened_by = zipfile.ZipFile(self.place), os.getpid()
            except zipfile.BadZipFile as error:
                raise CorruptData(f"{self.place} is no zip file: {error}.") from error
        return self._archive

    def __getstate__(self) -> dict[str, Any]:
        """An open file does not travel to another process."""
        return {**self.__dict__, "_archive": None}


def tree_of(files: Iterable[Path], tops: Iterable[str] = ()) -> FileTree:
    """Of the files of a published set: an archive, or the folder that holds them."""
    first = next(iter(files))
    return FileTree(first if first.is_file() and first.suffix == ".zip" else first.parent, tops)
