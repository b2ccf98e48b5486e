"""From a table of a TOML file to a frozen record: names and types of its keys."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from normkit.lab.experiment import Data, Model, Train, Watch
from normkit.lab.lines import KeyPath
from normkit.lab.problems import Problems

RECORDS: dict[str, type] = {"data": Data, "model": Model, "train": Train, "watch": Watch}
NONE = "none"  # TOML has no word for nothing: lets a scale or variant take a value back

Record = TypeVar("Record")


class Unfit(Exception):
    """A value of the wrong type; says what was expected."""


@cache
def _hints(record: Any) -> dict[str, Any]:
    return get_type_hints(record)


def types(record: type) -> dict[str, Any]:
    """The type of each key of a record."""
    return _hints(record)


def check_table(record: type, table: Any, path: KeyPath, problems: Problems) -> None:
    """Note every key that the record does not have, and every value of the wrong type."""
    if not isinstance(table, Mapping):
        problems.add(path, f"expects a table of keys, got {said(table)}.")
        return
    known = types(record)
    for key, value in table.items():
        if key not in known:
            problems.unknown((*path, key), known)
            continue
        try:
            fit(known[key], value)
        except Unfit as unfit:
            problems.add((*path, key), f"expects {unfit}, got {said(value)}.")


def made(record: type[Record], table: Mapping[str, Any]) -> Record:
    """The record of a table that was checked before."""
    return record(**{key: fit(types(record)[key], value) for key, value in table.items()})


def fit(kind: Any, value: Any) -> Any:
    """A value as the type wants it: 1 becomes 1.0 where fractions are meant, lists tuples."""
    if type(None) in get_args(kind):
        if value is None or value == NONE:
            return None
        inner = next(each for each in get_args(kind) if each is not type(None))
        try:
            return fit(inner, value)
        except Unfit as unfit:
            raise Unfit(f'{unfit} or "{NONE}"') from None
    if get_origin(kind) is tuple:
        if not isinstance(value, list | tuple):
            raise Unfit(f"a list, each entry {_article(get_args(kind)[0])}")
        return tuple(fit(get_args(kind)[0], each) for each in value)
    if kind in PLAIN:
        return PLAIN[kind](value)
    if not isinstance(value, Mapping):
        raise Unfit("a table of options")
    return {str(key): option(each) for key, each in value.items()}


def option(value: Any) -> Any:
    """A value whose type only the function knows that will get it."""
    if isinstance(value, Mapping):
        return {str(key): option(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return tuple(option(each) for each in value)
    if isinstance(value, bool | int | str) or (isinstance(value, float) and value == value):
        return value
    raise Unfit("numbers, texts, true or false, lists and tables")


def _bool(value: Any) -> bool:
    if not isinstance(value, bool):
        raise Unfit("true or false")
    return value


def _int(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise Unfit("a whole number")
    return value


def _float(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise Unfit("a finite number")
    return float(value)


def _str(value: Any) -> str:
    if not isinstance(value, str):
        raise Unfit("a text")
    return value


PLAIN: dict[Any, Callable[[Any], Any]] = {bool: _bool, int: _int, float: _float, str: _str}


def _article(kind: Any) -> str:
    return {int: "a whole number", str: "a text", float: "a number"}.get(kind, "a value")


def said(value: Any) -> str:
    """A value as the file says it, if it is short."""
    if isinstance(value, bool):
        return str(value).lower()
    text = "a table" if isinstance(value, Mapping) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
