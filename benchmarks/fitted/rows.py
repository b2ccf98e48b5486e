"""Results as lines of JSON in one file: what is there is not measured again."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def append(path: Path, row: Row) -> None:
    """One line in one write, so that several processes can share the file."""
    line = json.dumps(row, separators=(",", ":")) + "\n"
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, line.encode())
    finally:
        os.close(file)


def note_missing(path: Path, job: str, why: str) -> None:
    """Say why something could not be measured, or, with an empty reason, that it is there now."""
    before = read(path, kind="missing", job=job)
    if why or (before and before[-1]["why"]):
        append(path, {"kind": "missing", "job": job, "why": why})


def read(path: Path, **wanted: Any) -> list[Row]:
    """The rows whose entries are as wanted; a last line that was cut off is left out."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text().splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if all(row.get(key) == value for key, value in wanted.items()):
            rows.append(row)
    return rows
