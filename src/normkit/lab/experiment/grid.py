"""The grid of an experiment: its axes, its cells, and what changes from one cell to the next.

An axis is a key of the setting, such as "train.worker_batch", or a word of its own. What else
changes with its values, and what a word stands for, is said under ``along``:

    [grid]
    "train.worker_batch" = [2, 64]
    batch = ["micro", "large"]
    [along."train.worker_batch"]
    "train.lr" = [0.003, 0.1]  # one for each value of the axis, in its order; or one for all
    [along.batch]
    "train.batch" = [1, 128]

A variant may have its own ``along``, which counts more than that of the experiment; a norm that
looks at single samples is trained once for all cells of the first axis above with
``along."train.worker_batch" = { "train.worker_batch" = "none" }``.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from normkit.errors import nearest
from normkit.lab.experiment.fields import RECORDS, WrongType, fit, flat, option, shorten, types
from normkit.lab.experiment.problems import KeyPath, Problems
from normkit.lab.experiment.records import Cell
from normkit.lab.experiment.steps import KINDS

SECTIONS = (*RECORDS, *KINDS)


@dataclass(frozen=True)
class Axis:
    name: str
    values: tuple[Any, ...]
    path: KeyPath

    @property
    def is_key(self) -> bool:
        """Whether it names a key of the setting, and is not a word of its own."""
        return self.name.partition(".")[0] in SECTIONS


@dataclass(frozen=True)
class Change:
    """A key that has another value at each value of an axis."""

    axis: str
    key: str
    values: tuple[Any, ...]
    path: KeyPath


def read_axes(table: Any, problems: Problems) -> list[Axis]:
    """The axes of a [grid], in the order of the file."""
    if not isinstance(table, Mapping):
        problems.add(("grid",), f"expects a table, got {shorten(table)}.")
        return []
    axes = []
    for name, given, path in flat(table, ("grid",)):
        values = _values(name, given, path, problems)
        if values is not None and not values:
            problems.add(path, "has no values.")
        elif values is not None and len(set(values)) < len(values):
            problems.add(path, f"has a value twice: {shorten(list(values))}.")
        elif values:
            axes.append(Axis(name, values, path))
    return axes


def read_changes(
    table: Any, axes: Sequence[Axis], path: KeyPath, problems: Problems
) -> list[Change]:
    """What an ``along`` says."""
    if not isinstance(table, Mapping):
        problems.add(path, f"expects a table of axes, got {shorten(table)}.")
        return []
    changes = []
    for name, given, at in flat(table, path):
        fitting = [axis for axis in axes if name.startswith(f"{axis.name}.")]
        if not fitting:
            names = ", ".join(axis.name for axis in axes) or "none"
            problems.add(at, f"lies along no axis of the grid. Its axes: {names}.")
            continue
        axis = max(fitting, key=lambda each: len(each.name))
        key = name.removeprefix(f"{axis.name}.")
        section = key.partition(".")[0]
        if section not in SECTIONS:
            problems.add(at, f"is not a key. {nearest(section, SECTIONS)}")
            continue
        values = _values(
            key, given if isinstance(given, list) else [given] * len(axis.values), at, problems
        )
        if values is not None and len(values) != len(axis.values):
            wanted = f"{len(axis.values)} values, one for each of {list(axis.values)}"
            problems.add(at, f"expects {wanted}, got {len(values)}.")
        elif values is not None:
            changes.append(Change(axis.name, key, values, at))
    return changes


def cells(axes: Sequence[Axis]) -> list[Cell]:
    """Every point of the grid, the last axis fastest; one without a name if there is no grid."""
    names = [axis.name for axis in axes]
    points = itertools.product(*(axis.values for axis in axes))
    return [tuple(zip(names, point, strict=True)) for point in points]


def _values(key: str, given: Any, path: KeyPath, problems: Problems) -> tuple[Any, ...] | None:
    """The values for a key, each of the type that the key has."""
    if not isinstance(given, list):
        problems.add(path, f"expects a list of values, got {shorten(given)}.")
        return None
    section, _, name = key.partition(".")
    free = section not in RECORDS or (section in ("model", "task") and name.startswith("options."))
    if not free and name not in types(RECORDS[section]):
        hint = nearest(name, types(RECORDS[section]))
        problems.add(path, f"is not a key of {section}. {hint}")
        return None
    values = []
    for value in given:
        try:
            if _holds_table(value):
                raise WrongType(
                    "numbers, strings or lists; tables only by longer keys, such as model.options.x"
                )
            values.append(option(value) if free else fit(types(RECORDS[section])[name], value))
        except WrongType as error:
            problems.add(path, f"expects {error}, got {shorten(value)}.")
            return None
    return tuple(values)


def _holds_table(value: Any) -> bool:
    """Whether it could not be part of a cell, which must be hashable."""
    inner = value if isinstance(value, list) else ()
    return isinstance(value, Mapping) or any(map(_holds_table, inner))
