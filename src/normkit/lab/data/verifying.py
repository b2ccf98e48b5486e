"""Is a file what was published? Checked by MD5, once: a file that has not changed is believed."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import zlib
from pathlib import Path

from normkit.core.atomic_write import write_text
from normkit.lab.data.errors import CorruptData

PIECE = 1 << 20


def verify(file: Path, md5: str | None, size: int | None = None, packed: bool = False) -> None:
    """Raises CorruptData unless the file, or with ``packed`` what is compressed in it, has ``md5``.

    Without one it suffices that the file can be read. ``size`` is of the file itself, and only
    makes the message clearer.
    """
    status = file.stat()
    stamp: list[object] = [status.st_size, status.st_mtime_ns, md5]
    key = str(file.resolve())
    if _remembered().get(key) == stamp:
        return
    try:
        found = checksum(file, packed)
    except (OSError, EOFError, zlib.error) as error:
        raise CorruptData(f"{file} cannot be read: {str(error).rstrip('.')}.") from error
    if md5 is not None and found != md5:
        raise CorruptData(
            f"{file} is not as published: {_difference(status.st_size, size, found, md5)}."
        )
    _remember(key, stamp)


def checksum(file: Path, packed: bool = False) -> str:
    """The MD5 of a file, or of what is compressed in it, if it is compressed."""
    digest = hashlib.md5(usedforsecurity=False)
    with file.open("rb") as plain:
        compressed = packed and plain.read(2) == b"\x1f\x8b"
    with gzip.open(file, "rb") if compressed else file.open("rb") as content:
        while piece := content.read(PIECE):
            digest.update(piece)
    return digest.hexdigest()


def _difference(size: int, published: int | None, found: str, md5: str) -> str:
    if published is not None and size < published:
        return f"it has {size:,} bytes, {published - size:,} fewer than the published file"
    if published is not None and size > published:
        return f"it has {size:,} bytes, {size - published:,} more than the published file"
    return f"its MD5 is {found}, that of the published file {md5}"


def _memory() -> Path:
    """Of this user; whoever can write it could as well change the data."""
    given = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA")
    return (Path(given) if given else Path.home() / ".cache") / "normkit" / "verified.json"


def _remembered() -> dict[str, list[object]]:
    try:
        found = json.loads(_memory().read_text(encoding="utf-8"))
    except (OSError, ValueError, RuntimeError):  # none yet, damaged, or no home
        return {}
    return found if isinstance(found, dict) else {}


def _remember(key: str, stamp: list[object]) -> None:
    try:
        write_text(_memory(), json.dumps({**_remembered(), key: stamp}, indent=0))
    except (OSError, RuntimeError):
        return  # nowhere to remember it: it will be verified again
