"""The cells of an experiment as a table: one axis of the grid across, the others down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from normkit.errors import UnknownName, nearest
from normkit.lab.experiment import Cell
from normkit.lab.report.words import axis_words, value_words


@dataclass(frozen=True)
class Arrangement:
    """Columns along one axis, and a group of rows for every point of the other axes."""

    axis: str | None  # of the columns; None where there is no grid
    columns: tuple[Any, ...]
    groups: tuple[Cell, ...]
    cells: tuple[Cell, ...]

    def cell(self, group: Cell, column: Any) -> Cell | None:
        """The cell in a place, or None where the grid has a hole."""
        wanted = dict(group) if self.axis is None else {**dict(group), self.axis: column}
        return next((cell for cell in self.cells if dict(cell) == wanted), None)

    @property
    def title(self) -> str:
        return "" if self.axis is None else axis_words(self.axis)

    def heads(self) -> list[str]:
        return [value_words(column) for column in self.columns]


def axes_of(cells: Sequence[Cell]) -> dict[str, list[Any]]:
    """The axes of a grid with their values, in the order of the file."""
    axes: dict[str, list[Any]] = {}
    for cell in cells:
        for path, value in cell:
            values = axes.setdefault(path, [])
            if value not in values:
                values.append(value)
    return axes


def is_numeric(values: Sequence[Any]) -> bool:
    return all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in values)


def arrange(cells: Sequence[Cell], columns: str | None = None) -> Arrangement:
    """A table of the cells; across goes the axis of numbers that has the most values.

    >>> made = arrange([(("model.name", "a"), ("train.batch", b)) for b in (2, 64)])
    >>> made.axis, made.columns, made.groups
    ('train.batch', (2, 64), ((('model.name', 'a'),),))
    """
    axes = axes_of(cells)
    if columns is not None and columns not in axes:
        raise UnknownName(f"The grid has no axis {columns!r}. {nearest(columns, axes)}")
    if not axes:
        return Arrangement(None, (None,), ((),), tuple(cells))
    if columns is None:
        numeric = [path for path, values in axes.items() if is_numeric(values)]
        columns = max(numeric or axes, key=lambda path: len(axes[path]))
    groups = dict.fromkeys(without(cell, columns) for cell in cells)
    return Arrangement(columns, tuple(axes[columns]), tuple(groups), tuple(cells))


def without(cell: Cell, path: str) -> Cell:
    return tuple((axis, value) for axis, value in cell if axis != path)
