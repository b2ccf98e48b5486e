"""How a published set is kept: its files and folders, in any of several layouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from normkit.lab.data.errors import CorruptData
from normkit.lab.data.records import Listing, Raw
from normkit.lab.data.verifying import verify


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
class Layout:
    """One of the forms in which people keep a set: files in a folder, and how they are read."""

    files: tuple[File | Folder, ...]
    read: Callable[[Sequence[Path]], Raw | Listing]
    folders: tuple[str, ...] = ("",)  # below a place to look; "": the place itself


@dataclass(frozen=True)
class Source:
    """A published data set."""

    name: str
    layouts: tuple[Layout, ...]
    folders: tuple[str, ...]  # people's names for its folder
    get: str  # how a person comes by it
    classes: int | None = None  # None: of somebody's own images
    samples: tuple[int, int] | None = None  # to train on, to test on
