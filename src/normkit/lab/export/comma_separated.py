"""Columns as CSV (RFC 4180)."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from typing import Any

from normkit.lab.export.columns import Column


def csv_text(columns: Sequence[Column]) -> str:
    """A heading and a line for each row. What is not known is empty; lists are JSON.

    >>> csv_text([Column("variant", "text", ["a, b"]), Column("score", "number", [0.5])])
    'variant,score\\r\\n"a, b",0.5\\r\\n'
    """
    made = io.StringIO()
    # with both characters in the line's end, fields that hold one of them are quoted
    writer = csv.writer(made, lineterminator="\r\n")
    writer.writerow([column.name for column in columns])
    for row in zip(*(column.values for column in columns), strict=True):
        writer.writerow([_cell(value) for value in row])
    return made.getvalue()


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        # JSON knows no NaN: a reader would stumble
        plain = [None if isinstance(v, float) and not math.isfinite(v) else v for v in value]
        return json.dumps(plain, separators=(",", ":"))
    return repr(value) if isinstance(value, float) else str(value)
