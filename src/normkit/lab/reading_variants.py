"""What an experiment compares: each variant of the file, at each cell of the grid."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from normkit.lab import limits
from normkit.lab.experiment import Cell, Data, Model, Setting, Step, Train, Variant, Watch
from normkit.lab.grid import Axis, Change, flat, read_changes
from normkit.lab.lines import KeyPath
from normkit.lab.problems import Problems
from normkit.lab.reading_fields import NONE, RECORDS, check_table, made, said
from normkit.lab.reading_steps import KINDS, SUGAR, known_options, steps_of
from normkit.lab.scales import laid_over

KEYS = ("name", "steps", *SUGAR, *RECORDS, "only", "along")


@dataclass(frozen=True)
class Draft:
    """A variant as the file has it, before the grid."""

    name: str
    path: KeyPath
    tables: Mapping[str, Mapping[str, Any]]  # what it changes in data, model, train, watch
    steps: tuple[Step, ...]
    only: Mapping[str, tuple[Any, ...]]
    changes: tuple[Change, ...]

    def lives_in(self, cell: Cell) -> bool:
        return all(value in self.only.get(axis, (value,)) for axis, value in cell)


def read_drafts(listed: Any, axes: Sequence[Axis], problems: Problems) -> list[Draft]:
    if not isinstance(listed, list) or not listed:
        problems.add(("variants",), "must be there: one [[variants]] for each thing to compare.")
        return []
    drafts: dict[str, Draft] = {}
    for number, table in enumerate(listed):
        path: KeyPath = ("variants", number)
        if not isinstance(table, Mapping):
            problems.add(path, f"expects a table, got {said(table)}.")
            continue
        draft = _draft(table, path, axes, problems)
        if draft.name in drafts:
            problems.add((*path, "name"), f"is {draft.name!r}, the name of a variant before it.")
        drafts.setdefault(draft.name, draft)
    return list(drafts.values())


def _draft(
    table: Mapping[str, Any], path: KeyPath, axes: Sequence[Axis], problems: Problems
) -> Draft:
    for key in table:
        if key not in KEYS:
            problems.unknown((*path, key), KEYS)
    name = table.get("name")
    if not isinstance(name, str) or not name.strip():
        problems.add(path, f"expects a name, got {said(name) if name is not None else 'none'}.")
        name = f"variant {path[-1]}"
    elif not name.isprintable():
        problems.add((*path, "name"), f"expects a text on one line, got {said(name)}.")
    tables = {key: table[key] for key in RECORDS if key in table}
    for key, value in tables.items():
        check_table(RECORDS[key], value, (*path, key), problems)
    tables = {key: value for key, value in tables.items() if isinstance(value, Mapping)}
    steps = steps_of(table, path, problems)
    only = _only(table.get("only", {}), axes, (*path, "only"), problems)
    changes = read_changes(table.get("along", {}), axes, (*path, "along"), problems)
    return Draft(name, path, tables, steps, only, tuple(changes))


def _only(
    table: Any, axes: Sequence[Axis], path: KeyPath, problems: Problems
) -> dict[str, tuple[Any, ...]]:
    if not isinstance(table, Mapping):
        problems.add(path, f"expects a table of axes, got {said(table)}.")
        return {}
    found = {}
    for axis, values, at in flat(table, path):
        wanted = tuple(values) if isinstance(values, list) else (values,)
        known = {each.name: each.values for each in axes}
        if axis not in known:
            named = ", ".join(known) or "none"
            problems.add(at, f"is no axis of the grid. Its axes: {named}.")
        elif not set(wanted) & set(known[axis]):
            problems.add(at, f"leaves nothing: the axis has {list(known[axis])}.")
        else:
            found[axis] = wanted
    return found


def variants_of(
    drafts: Sequence[Draft],
    base: Mapping[str, Any],
    axes: Sequence[Axis],
    changes: Sequence[Change],
    cells: Sequence[Cell],
    problems: Problems,
) -> Iterator[Variant]:
    """Every variant in every cell that it lives in, cell by cell; faults are noted."""
    for cell in cells:
        for draft in drafts:
            if draft.lives_in(cell):
                setting, blame = _setting(draft, base, axes, changes, cell)
                for key, fault in limits.faults(setting):
                    problems.add(blame.get(key, tuple(key.split("."))), fault)
                yield Variant(draft.name, setting, cell)


def _setting(
    draft: Draft,
    base: Mapping[str, Any],
    axes: Sequence[Axis],
    changes: Sequence[Change],
    cell: Cell,
) -> tuple[Setting, dict[str, KeyPath]]:
    """The setting of a variant in a cell, and where in the file its keys were said."""
    tables = laid_over({key: base.get(key, {}) for key in RECORDS}, draft.tables)
    blame = {
        f"{section}.{key}": (*draft.path, section, key)
        for section, table in draft.tables.items()
        for key in table
    }
    steps = draft.steps
    for key, value, path in assignments(draft, axes, changes, cell):
        section, *names = key.split(".")
        blame[key] = path
        if section in KINDS:
            steps = with_option(steps, section, ".".join(names), value)
            continue
        for name in reversed(names):
            value = {name: value}
        tables[section] = laid_over(tables[section], value)
    made_of: dict[str, Any] = {key: made(RECORDS[key], tables[key]) for key in RECORDS}
    data: Data = made_of["data"]
    model: Model = made_of["model"]
    train: Train = made_of["train"]
    watch: Watch = made_of["watch"]
    return Setting(data, model, steps, train, watch), blame


def assignments(
    draft: Draft, axes: Sequence[Axis], changes: Sequence[Change], cell: Cell
) -> list[tuple[str, Any, KeyPath]]:
    """What a cell sets for a variant: key, value, and where that is said. Its own along wins."""
    found: dict[str, tuple[Any, KeyPath]] = {}
    for axis, (_, value) in zip(axes, cell, strict=True):
        if axis.is_key:
            found[axis.name] = (value, axis.path)
        for change in (*changes, *draft.changes):
            if change.axis == axis.name:
                found[change.key] = (change.values[axis.values.index(value)], change.path)
    return [(key, value, path) for key, (value, path) in found.items()]


def with_option(steps: tuple[Step, ...], kind: str, name: str, value: Any) -> tuple[Step, ...]:
    """The steps with an option set in each of a kind that has it."""
    changed = []
    for step in steps:
        known = known_options(kind, step.name, step.options) if step.kind == kind else {}
        if name in known:
            given = None if value == NONE and "None" in known[name] else value
            step = replace(step, options={**step.options, name: given})
        changed.append(step)
    return tuple(changed)
