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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from normkit.errors import nearest
from normkit.lab.experiment import Cell
from normkit.lab.lines import KeyPath
from normkit.lab.problems import Problems
from normkit.lab.reading_fields import RECORDS, Unfit, fit, option, said, types
from normkit.lab.reading_steps import KINDS


@dataclass(frozen=True)
class Axis:
    name: str
    values: tuple[Any, ...]
    path: KeyPath

    @property
    def is_key(self) -> bool:
        """Whether it names a key of the setting, and is not a word of its own."""
        return self.name.partition(".")[0] in (*RECORDS, *KINDS)


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
        problems.add(("grid",), f"expects a table, got {said(table)}.")
        return []
    axes = []
    for name, values, path in flat(table, ("grid",)):
        found = _values(name, values, path, problems)
        if found is not None and not found:
            problems.add(path, "has no values.")
        elif found is not None and len(set(found)) < len(found):
            problems.add(path, f"has a value twice: {said(list(found))}.")
        elif found:
            axes.append(Axis(name, found, path))
    return axes


def read_changes(
    table: Any, axes: Sequence[Axis], path: KeyPath, problems: Problems
) -> list[Change]:
    """What an ``along`` says."""
    if not isinstance(table, Mapping):
        problems.add(path, f"expects a table of axes, got {said(table)}.")
        return []
    changes = []
    for name, values, at in flat(table, path):
        fitting = [axis for axis in axes if name.startswith(f"{axis.name}.")]
        if not fitting:
            known = ", ".join(axis.name for axis in axes) or "none"
            problems.add(at, f"lies along no axis of the grid. Its axes: {known}.")
            continue
        axis = max(fitting, key=lambda each: len(each.name))
        key = name.removeprefix(f"{axis.name}.")
        if not Axis(key, (), at).is_key:
            problems.add(at, f"is no key. {nearest(key.partition('.')[0], [*RECORDS, *KINDS])}")
            continue
        if not isinstance(values, list):
            values = [values] * len(axis.values)
        found = _values(key, values, at, problems)
        if found is not None and len(found) != len(axis.values):
            wanted = f"{len(axis.values)} values, one for each of {list(axis.values)}"
            problems.add(at, f"expects {wanted}, got {len(found)}.")
        elif found is not None:
            changes.append(Change(axis.name, key, found, at))
    return changes


def cells(axes: Sequence[Axis]) -> list[Cell]:
    """Every point of the grid, the last axis fastest; one without a name if there is no grid."""
    names = [axis.name for axis in axes]
    points = itertools.product(*(axis.values for axis in axes))
    return [tuple(zip(names, point, strict=True)) for point in points]


def flat(table: Mapping[str, Any], path: KeyPath = ()) -> Iterator[tuple[str, Any, KeyPath]]:
    """The leaves of a table by dotted name, whether the file quotes the dots or not."""
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            for name, leaf, at in flat(value, (*path, key)):
                yield f"{key}.{name}", leaf, at
        else:
            yield key, value, (*path, key)


def _values(key: str, values: Any, path: KeyPath, problems: Problems) -> tuple[Any, ...] | None:
    """The values for a key, each of the type that the key has."""
    if not isinstance(values, list):
        problems.add(path, f"expects a list of values, got {said(values)}.")
        return None
    found = []
    for value in values:
        try:
            found.append(_value(key, value))
        except Unfit as unfit:
            problems.add(path, f"expects {unfit}, got {said(value)}.")
            return None
        except KeyError:
            section, _, name = key.partition(".")
            problems.add(path, f"is no key of {section}. {nearest(name, types(RECORDS[section]))}")
            return None
    return tuple(found)


def _value(key: str, value: Any) -> Any:
    if _holds_table(value):
        raise Unfit("numbers, texts or lists; tables only by longer keys, such as model.options.x")
    section, _, name = key.partition(".")
    if section not in RECORDS or (section == "model" and name.startswith("options.")):
        return option(value)
    return fit(types(RECORDS[section])[name], value)


def _holds_table(value: Any) -> bool:
    """Whether it could not be part of a cell, which must be comparable at a glance."""
    inner = value if isinstance(value, list) else ()
    return isinstance(value, Mapping) or any(map(_holds_table, inner))
