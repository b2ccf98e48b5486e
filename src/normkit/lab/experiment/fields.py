"""Values of a TOML file: tables become frozen records, each key checked for its name and type."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

from normkit.lab.experiment.problems import BadExperiment, KeyPath, Problems
from normkit.lab.experiment.records import Data, Model, TaskSpec, Train, Watch

RECORDS: dict[str, type] = {
    "data": Data,
    "model": Model,
    "train": Train,
    "watch": Watch,
    "task": TaskSpec,
}
BY_NAME = ("data", "model", "task")  # a name alone stands for the table: task = "mytask.py:Own"
NONE = "none"  # TOML has no word for nothing: lets a scale or variant take a value back
MOST_SEEDS = 10_000  # more are a slip, and would fill the memory


class WrongType(Exception):
    """A value of the wrong type; the message says what was expected."""


@cache
def types(record: Any) -> dict[str, Any]:
    """The type of each key of a record."""
    return get_type_hints(record)


def check_table(record: type, table: Any, path: KeyPath, problems: Problems) -> None:
    """Note every key that the record does not have, and every value of the wrong type."""
    if not isinstance(table, Mapping):
        problems.add(path, f"expects a table of keys, got {shorten(table)}.")
        return
    keys = types(record)
    for key, value in table.items():
        if key in keys:
            checked(keys[key], value, (*path, key), problems)
        else:
            problems.unknown((*path, key), keys)


def checked(kind: Any, value: Any, path: KeyPath, problems: Problems) -> Any:
    """A value as its type wants it; None, and a note, if it is of another type."""
    try:
        return fit(kind, value)
    except WrongType as error:
        problems.add(path, f"expects {error}, got {shorten(value)}.")
        return None


def record_of(record: Any, table: Mapping[str, Any]) -> Any:
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
        except WrongType as error:
            raise WrongType(f'{error} or "{NONE}"') from None
    if get_origin(kind) is tuple:
        if not isinstance(value, list | tuple):
            entry = {int: "an integer", str: "a string"}.get(get_args(kind)[0], "a value")
            raise WrongType(f"a list, each entry {entry}")
        return tuple(fit(get_args(kind)[0], each) for each in value)
    if kind is float:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not math.isfinite(value):
            raise WrongType("a finite number")
        return float(value)
    for plain, expected in ((bool, "true or false"), (int, "an integer"), (str, "a string")):
        if kind is plain:
            if type(value) is not plain:
                raise WrongType(expected)
            return value
    if not isinstance(value, Mapping):
        raise WrongType("a table of options")
    return option(value)


def option(value: Any) -> Any:
    """A value whose type is known only to the function that will get it."""
    if isinstance(value, Mapping):
        return {str(key): option(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return tuple(option(each) for each in value)
    if isinstance(value, bool | int | str) or (isinstance(value, float) and value == value):
        return value
    raise WrongType("numbers, strings, true or false, lists and tables")


def seeds_of(value: Any) -> tuple[int, ...]:
    """5 means seeds 1 to 5; a list is taken as it is.

    >>> seeds_of(3)
    (1, 2, 3)
    """
    seeds = range(1, value + 1) if type(value) is int else value
    fits = isinstance(seeds, range | list | tuple) and 0 < len(seeds) <= MOST_SEEDS
    if not (
        fits
        and all(type(seed) is int and seed >= 0 for seed in seeds)
        and len(set(seeds)) == len(seeds)
    ):
        raise BadExperiment(
            f"seeds expects a number from 1 to {MOST_SEEDS:,}, or a list of different numbers, "
            f"got {shorten(value)}."
        )
    return tuple(seeds)


def laid_over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Tables are merged key by key; everything else, lists of tables too, is replaced."""
    result = dict(below)
    for key, value in above.items():
        old = result.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        result[key] = laid_over(old, value) if both else value  # type: ignore[arg-type]
    return result


def with_names(table: Mapping[str, Any]) -> dict[str, Any]:
    """A table in which a name stands alone, as the table with that name.

    >>> with_names({"model": "native:mlp", "seeds": 3})
    {'model': {'name': 'native:mlp'}, 'seeds': 3}
    """
    return {
        key: {"name": v} if key in BY_NAME and isinstance(v, str) else v for key, v in table.items()
    }


def flat(table: Mapping[str, Any], path: KeyPath = ()) -> Iterator[tuple[str, Any, KeyPath]]:
    """The leaves of a table by dotted name, whether the file quotes the dots or not."""
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            for name, leaf, at in flat(value, (*path, key)):
                yield f"{key}.{name}", leaf, at
        else:
            yield key, value, (*path, key)


def shorten(value: Any) -> str:
    """A value as the file says it, if it is short."""
    if isinstance(value, bool):
        return str(value).lower()
    text = "a table" if isinstance(value, Mapping) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
