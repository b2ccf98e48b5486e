"""Keys that a file sets in two ways, variants that are one, and cells without a baseline."""

from __future__ import annotations

from collections.abc import Sequence

from normkit.errors import nearest
from normkit.lab.experiment import Run, Variant
from normkit.lab.grid import Axis, Change
from normkit.lab.problems import Problems
from normkit.lab.reading_steps import KINDS, known_options
from normkit.lab.reading_variants import Draft


def check_axes(
    axes: Sequence[Axis], changes: Sequence[Change], drafts: Sequence[Draft], problems: Problems
) -> None:
    """Note axes without effect, and keys that would get two values in one cell."""
    every = [*changes, *(change for draft in drafts for change in draft.changes)]
    for axis in axes:
        if not axis.is_key and not any(change.axis == axis.name for change in every):
            problems.add(
                axis.path,
                "is no key of the setting, such as train.lr, and nothing changes along it. "
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


def _check_used(
    key: str, path: tuple[str | int, ...], drafts: Sequence[Draft], problems: Problems
) -> None:
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
    own = {change.key for change in draft.changes}
    moving = by_axis | own | {change.key for change in changes}
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
    if baseline not in names:
        if baseline is None:
            said = "must be there: the variant that the others are compared with."
        else:
            said = f"is {baseline!r}, which is no variant. {nearest(str(baseline), names)}"
        problems.add(("baseline",), said)
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
        key = (variant.cell, Run(variant.setting, 0).id)
        other = first.setdefault(key, variant.name)
        if other != variant.name:
            where = "".join(f", at {axis} = {value!r}" for axis, value in variant.cell)
            problems.add(paths[variant.name], f"({variant.name!r}) equals {other!r}{where}.")
