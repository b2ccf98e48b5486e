"""A column of a table, and which kind of values it has."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

TEXT, INTEGER, NUMBER, FLAG = "text", "integer", "number", "flag"
INTEGERS, NUMBERS = "integers", "numbers"  # lists


@dataclass(frozen=True)
class Column:
    """A name, what its values are, and a value for each row; None where there is none."""

    name: str
    kind: str
    values: list[Any]


def fitting(name: str, values: list[Any]) -> Column:
    """A column of the narrowest kind that holds all values; JSON text if they are mixed.

    >>> fitting("x", [1, None, 2.5]).kind, fitting("x", [1, "a"]).values
    ('number', ['1', 'a'])
    """
    known = [value for value in values if value is not None]
    if known and all(isinstance(value, bool) for value in known):
        return Column(name, FLAG, values)
    if known and all(_is_number(value) for value in known):
        whole = all(isinstance(value, int) for value in known)
        return Column(name, INTEGER if whole else NUMBER, values)
    lists = [value if isinstance(value, (list, tuple)) else [value] for value in known]
    if known and all(_is_number(each) or each is None for value in lists for each in value):
        rest = iter(lists)
        return Column(name, NUMBERS, [None if v is None else list(next(rest)) for v in values])
    return Column(name, TEXT, [_text(value) for value in values])


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _text(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=_plain)


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else str(value)
