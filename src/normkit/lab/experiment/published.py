"""The numbers that a paper prints, each for a variant and a cell of the grid.

    [[published]]
    variant = "bn"; cell = { "train.worker_batch" = 2 }; value = 66.512; note = "table 2"
    [[published]]                      # or several at once, by the values of an axis
    variant = "gn"; along = "train.worker_batch"; values = { 2 = 75.872, 4 = 76.24 }
    [[published]]                      # of another metric than the experiment's
    variant = "bn"; metric = "top5_accuracy"; cell = { "train.worker_batch" = 2 }; value = 86.1

(each key on a line of its own). An entry for a variant or cell that only another scale of the
file has is left out, and so is one of a metric that is not asked for; one that no scale has is an
error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from normkit.errors import nearest
from normkit.lab.experiment.fields import checked, flat, shorten
from normkit.lab.experiment.grid import Axis
from normkit.lab.experiment.problems import KeyPath, Problems
from normkit.lab.experiment.records import Cell, Published, Variant
from normkit.lab.results import TaskMetric

ENTRY_KEYS = ("variant", "cell", "value", "std", "note", "along", "values", "metric")


@dataclass(frozen=True)
class Scope:
    """What an entry may speak of, at this scale and at all scales of the file together."""

    metric: str  # of the file, whatever is asked for
    metrics: Mapping[str, TaskMetric]  # of its task
    variants: Sequence[Variant]
    axes: Sequence[Axis]
    all_names: frozenset[str]
    all_values: Mapping[str, frozenset[Any]]


def published_of(
    entries: Any, metric: str, scope: Scope, problems: Problems
) -> tuple[Published, ...]:
    if not isinstance(entries, list) or not all(isinstance(each, Mapping) for each in entries):
        problems.add(("published",), "expects a list of tables.")
        return ()
    numbers: dict[tuple[Any, ...], Published] = {}
    for index, table in enumerate(entries):
        path: KeyPath = ("published", index)
        for number in _numbers(table, metric, scope, path, problems):
            key = (number.variant, frozenset(number.cell), number.note)
            if key in numbers:
                problems.add(path, "repeats an entry before it.")
            numbers[key] = number
    return tuple(numbers.values())


def _numbers(
    table: Mapping[str, Any], metric: str, scope: Scope, path: KeyPath, problems: Problems
) -> Iterator[Published]:
    for key in table:
        if key not in ENTRY_KEYS:
            problems.unknown((*path, key), ENTRY_KEYS)
    variant = table.get("variant")
    if variant not in scope.all_names:
        hint = nearest(str(variant), scope.all_names)
        problems.add((*path, "variant"), f"is {shorten(variant)}, which is not a variant. {hint}")
        return
    own = table.get("metric", scope.metric)
    if own not in scope.metrics:
        problems.add((*path, "metric"), f"is {shorten(own)}. {nearest(str(own), scope.metrics)}")
        return
    std = checked(float, table["std"], (*path, "std"), problems) if "std" in table else None
    note = str(table.get("note", ""))
    for cell, value, at in _points(table, scope, path, problems):
        percent = scope.metrics[own].percent
        if percent and not 0 <= value <= 100:
            problems.add(at, f"expects percent, from 0 to 100, got {value:g}.")
        for whole in _whole_cells(str(variant), cell, scope, at, problems):
            if own == metric:
                spread = None if std is None else _fraction(std, percent)
                yield Published(str(variant), _fraction(value, percent), whole, spread, note)


def _points(
    table: Mapping[str, Any], scope: Scope, path: KeyPath, problems: Problems
) -> Iterator[tuple[dict[str, Any], float, KeyPath]]:
    """The cells that an entry speaks of, as far as it names them, with their numbers."""
    given = table.get("cell", {})
    if not isinstance(given, Mapping):
        problems.add((*path, "cell"), f"expects a table of axes, got {shorten(given)}.")
        return
    cell = {axis: value for axis, value, _ in flat(given)}
    if "along" not in table and "values" not in table:
        if "value" not in table:
            problems.add(path, "expects a value.")
        elif (value := checked(float, table["value"], (*path, "value"), problems)) is not None:
            yield cell, value, path
        return
    axis, values = str(table.get("along")), table.get("values")
    if axis not in scope.all_values or not isinstance(values, Mapping) or "value" in table:
        problems.add(path, "expects along, an axis of the grid, and values, a table; no value.")
        return
    by_name = {str(value): value for value in scope.all_values[axis]}
    for key, given in values.items():
        at = (*path, "values", key)
        number = checked(float, given, at, problems)
        if key not in by_name:
            problems.add(at, f"is not a value of {axis}. {nearest(key, by_name)}")
        elif number is not None:
            yield {**cell, axis: by_name[key]}, number, at


def _whole_cells(
    variant: str, cell: Mapping[str, Any], scope: Scope, path: KeyPath, problems: Problems
) -> Iterator[Cell]:
    """The cell of this scale that is meant; none if only another scale has it."""
    for axis, value in cell.items():
        if axis not in scope.all_values:
            hint = nearest(axis, scope.all_values) if scope.all_values else ""
            problems.add(path, f"names {axis!r}, which is not an axis of the grid. {hint}".rstrip())
            return
        if value not in scope.all_values[axis]:
            values = sorted(scope.all_values[axis], key=str)
            problems.add(path, f"names {axis} = {value!r}; the axis has {values}.")
            return
    if any(axis not in {each.name for each in scope.axes} for axis in cell):
        return
    here = [
        each.cell
        for each in scope.variants
        if each.name == variant and cell.items() <= dict(each.cell).items()
    ]
    if len(here) > 1:
        missing = [axis.name for axis in scope.axes if axis.name not in cell]
        problems.add(path, f"fits {len(here)} cells. Say {' and '.join(missing)} as well.")
        return
    yield from here


def _fraction(value: float, percent: bool) -> float:
    """Papers print shares in percent; records hold fractions."""
    return round(value / 100, 12) if percent else value
