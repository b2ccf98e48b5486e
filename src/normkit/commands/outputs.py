"""Files that a command is asked to write."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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


def text(content: str) -> Callable[[Path], None]:
    """What writes a text, for ``atomic_write_all``."""
    return lambda path: _write_text(path, content)


def _write_text(path: Path, content: str) -> None:
    path.write_text(content, encoding="utf-8")
