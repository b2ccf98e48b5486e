"""Files that are complete or not there."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path


def save_whole(path: str | Path, save: Callable[[Path], object]) -> Path:
    """Let ``save`` write a file under another name beside ``path``, then rename it."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    # a name of its own: processes of two machines that share a folder may have one number
    beside = target.with_name(f".{os.getpid()}-{secrets.token_hex(4)}.{target.name}")
    try:
        save(beside)
        os.replace(beside, target)
    finally:
        beside.unlink(missing_ok=True)
    return target


def write_text(path: str | Path, text: str) -> Path:
    """UTF-8 with plain line ends on every system: a page's scripts are known by their hashes."""
    return save_whole(path, lambda beside: beside.write_text(text, encoding="utf-8", newline="\n"))
