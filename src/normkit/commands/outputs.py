"""Files that a command writes: all of them complete, or none."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from normkit.errors import OptionError


def check(paths: Iterable[Path], force: bool) -> None:
    """An error, before any work, if a file could not be written at its end."""
    for path in paths:
        if not path.resolve().parent.is_dir():
            raise OptionError(f"There is no directory {path.parent} for {path.name}.")
        if path.is_dir():
            raise OptionError(f"{path} is a directory, expected the name of a file.")
        if path.exists() and not force:
            raise OptionError(f"{path} exists already. Try another name, or --force.")


def write(files: Mapping[Path, Callable[[Path], None]]) -> None:
    """Write files under other names, and rename them when all are complete.

    Each path comes with the function that writes it. The other name is in the same directory:
    a file cannot be renamed from one file system to another.
    """
    names = {path: path.with_name(f".{os.getpid()}.{path.name}") for path in files}
    try:
        for path, save in files.items():
            save(names[path])
        mask = os.umask(0)
        os.umask(mask)
        for path, name in names.items():
            name.chmod(0o666 & ~mask)  # some writers leave files that only their owner can read
            os.replace(name, path)
    finally:
        for name in names.values():
            name.unlink(missing_ok=True)


def text(content: str) -> Callable[[Path], None]:
    """What writes a text, for ``write``."""
    return lambda path: _write_text(path, content)


def _write_text(path: Path, content: str) -> None:
    path.write_text(content, encoding="utf-8")
