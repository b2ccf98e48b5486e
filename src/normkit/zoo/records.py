"""Results on disk, one a line, so that a sweep goes on where it was stopped."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import normkit
from normkit.errors import OptionError

# the parts of normkit that a trial depends on
TRIED = ("core", "engine", "layers", "catalog.py", "inspection", "conversion", "zoo")


class Records:
    """A file of JSON lines. A later line replaces an earlier one of the same name.

    Each line has a stamp, which says under what it was found. Lines with another stamp do not
    count: a new version of a library, or a change to normkit, makes a sweep begin again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.exists() and path.read_bytes()[:1] not in (b"", b"{"):
            raise OptionError(f"{path} is no file of zoo results. Try another name.")

    def add(self, stamp: str, name: str, facts: dict[str, Any]) -> None:
        line = json.dumps({"stamp": stamp, "name": name, **facts}, ensure_ascii=False)
        with self.path.open("a+b") as file:
            # after an interruption the last line may be half a line: it stays alone
            file.seek(0, 2)
            if file.tell():
                file.seek(-1, 2)
                line = line if file.read(1) == b"\n" else f"\n{line}"
            file.write(f"{line}\n".encode())

    def read(self, stamp: str) -> dict[str, dict[str, Any]]:
        """What is known under this stamp, by name."""
        return {line.pop("name"): line for line in self._lines() if line.pop("stamp") == stamp}

    def _lines(self) -> Iterator[dict[str, Any]]:
        if not self.path.exists():
            return
        for text in self.path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                line = json.loads(text)
            except json.JSONDecodeError:  # see add
                continue
            if isinstance(line, dict) and {"stamp", "name"} <= line.keys():
                yield line


def versions() -> dict[str, str]:
    """What the models depend on."""
    return {
        "torch": torch.__version__,
        **{name: metadata.version(name) for name in ("timm", "torchvision")},
    }


def source_digest() -> str:
    """Changes when a file does that has to do with conversion."""
    root = Path(normkit.__file__).parent
    found = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        name = file.relative_to(root)
        if name.parts[0] in TRIED:
            found.update(f"{name}".encode() + file.read_bytes())
    return found.hexdigest()[:12]
