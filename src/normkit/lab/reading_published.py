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

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from normkit.errors import nearest
from normkit.lab.experiment import Cell, Published, Variant
from normkit.lab.grid import Axis, flat
from normkit.lab.lines import KeyPath
from normkit.lab.problems import Problems
from normkit.lab.reading_fields import Unfit, fit, said
from normkit.lab.results import METRICS

KEYS = ("variant", "cell", "value", "std", "note", "along", "values", "metric")


@dataclass(frozen=True)
class Known:
    """What there is, at this scale and at all scales of the file together."""

    metric: str  # of the file, whatever is asked for
    variants: Sequence[Variant]
    axes: Sequence[Axis]
    names_anywhere: frozenset[str]
    values_anywhere: Mapping[str, frozenset[Any]]


def published_of(
    listed: Any, metric: str, known: Known, problems: Problems
) -> tuple[Published, ...]:
    if not isinstance(listed, list) or not all(isinstance(each, Mapping) for each in listed):
        problems.add(("published",), "expects a list of tables.")
        return ()
    found: dict[tuple[Any, ...], Published] = {}
    for number, table in enumerate(listed):
        path: KeyPath = ("published", number)
        for entry in _entries(table, metric, known, path, problems):
            key = (entry.variant, frozenset(entry.cell), entry.note)
            if key in found:
                problems.add(path, "says again what an entry before it says.")
            found[key] = entry
    return tuple(found.values())


def _entries(
    table: Mapping[str, Any], metric: str, known: Known, path: KeyPath, problems: Problems
) -> Iterator[Published]:
    for key in table:
        if key not in KEYS:
            problems.unknown((*path, key), KEYS)
    variant = table.get("variant")
    if variant not in known.names_anywhere:
        hint = nearest(str(variant), known.names_anywhere)
        problems.add((*path, "variant"), f"is {said(variant)}, which is no variant. {hint}")
        return
    own = table.get("metric", known.metric)
    if own not in METRICS:
        problems.add((*path, "metric"), f"is {said(own)}. {nearest(str(own), METRICS)}")
        return
    number = _number(table, "std", path, problems)
    std = None if number is None else _scaled(number, own)
    note = str(table.get("note", ""))
    for cell, value, at in _points(table, known, path, problems):
        if own != "loss" and not 0 <= value <= 100:
            problems.add(at, f"expects percent, from 0 to 100, got {value:g}.")
        for whole in _whole_cells(str(variant), cell, known, at, problems):
            if own == metric:
                yield Published(str(variant), _scaled(value, own), whole, std, note)


def _points(
    table: Mapping[str, Any], known: Known, path: KeyPath, problems: Problems
) -> Iterator[tuple[dict[str, Any], float, KeyPath]]:
    """The cells that an entry speaks of, as far as it names them, with their numbers."""
    given = table.get("cell", {})
    if not isinstance(given, Mapping):
        problems.add((*path, "cell"), f"expects a table of axes, got {said(given)}.")
        return
    cell = {axis: value for axis, value, _ in flat(given)}
    if "along" not in table and "values" not in table:
        if "value" not in table:
            problems.add(path, "expects a value.")
        elif (value := _number(table, "value", path, problems)) is not None:
            yield cell, value, path
        return
    axis, values = str(table.get("along")), table.get("values")
    if axis not in known.values_anywhere or not isinstance(values, Mapping) or "value" in table:
        problems.add(path, "expects along, an axis of the grid, and values, a table; no value.")
        return
    by_name = {str(value): value for value in known.values_anywhere[axis]}
    for key in values:
        number = _number(values, key, (*path, "values"), problems)
        if key not in by_name:
            hint = nearest(key, by_name)
            problems.add((*path, "values", key), f"is no value of {axis}. {hint}")
        elif number is not None:
            yield {**cell, axis: by_name[key]}, number, (*path, "values", key)


def _whole_cells(
    variant: str, cell: Mapping[str, Any], known: Known, path: KeyPath, problems: Problems
) -> Iterator[Cell]:
    """The cell of this scale that is meant; none if only another scale has it."""
    for axis, value in cell.items():
        if axis not in known.values_anywhere:
            hint = nearest(axis, known.values_anywhere) if known.values_anywhere else ""
            problems.add(path, f"names {axis!r}, which is no axis of the grid. {hint}".rstrip())
            return
        if value not in known.values_anywhere[axis]:
            values = sorted(known.values_anywhere[axis], key=str)
            problems.add(path, f"names {axis} = {value!r}; the axis has {values}.")
            return
    if any(axis not in {each.name for each in known.axes} for axis in cell):
        return
    here = [
        each.cell
        for each in known.variants
        if each.name == variant and cell.items() <= dict(each.cell).items()
    ]
    if len(here) > 1:
        missing = [axis.name for axis in known.axes if axis.name not in cell]
        problems.add(path, f"fits {len(here)} cells. Say {' and '.join(missing)} as well.")
        return
    yield from itertools.islice(here, 1)


def _number(table: Mapping[str, Any], key: str, path: KeyPath, problems: Problems) -> float | None:
    if key not in table:
        return None
    try:
        return float(fit(float, table[key]))
    except Unfit as unfit:
        problems.add((*path, key), f"expects {unfit}, got {said(table[key])}.")
        return None


def _scaled(value: float, metric: str) -> float:
    """Papers print accuracies and errors in percent; records hold fractions."""
    return value if metric == "loss" else round(value / 100, 12)
