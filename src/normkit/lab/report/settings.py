"""Every run's configuration: what all runs share, and in what they differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from normkit.lab.experiment import Experiment, Setting, Step
from normkit.lab.report.arranging import axes_of
from normkit.lab.report.words import value_words


@dataclass(frozen=True)
class Shared:
    key: str
    value: str
    usual: bool  # whether it is the default


@dataclass(frozen=True)
class Configuration:
    shared: tuple[Shared, ...]
    grid: tuple[tuple[str, str], ...]  # axes, and their values
    differing: tuple[str, ...]  # keys, without those that the grid sets
    rows: tuple[tuple[str, tuple[str, ...]], ...]  # variant, and its value for each of these keys


def configuration(experiment: Experiment) -> Configuration:
    """Both tables together hold every field of every setting."""
    flat = [dict(flattened(variant.setting)) for variant in experiment.variants]
    keys = list(dict.fromkeys(key for each in flat for key in each))
    usual = dict(flattened(Setting()))
    values = {key: [each.get(key) for each in flat] for key in keys}
    same = [key for key in keys if all(value == values[key][0] for value in values[key])]
    axes = axes_of(experiment.cells())
    on_grid = {key for key in axes if key in values and _set_by_grid(experiment, key, values[key])}
    differing = tuple(key for key in keys if key not in same and key not in on_grid)
    rows = []
    for variant, each in zip(experiment.variants, flat, strict=True):
        row = (variant.name, tuple(_shown(key, each.get(key)) for key in differing))
        if row not in rows:
            rows.append(row)
    shared = tuple(
        Shared(key, _shown(key, values[key][0]), values[key][0] == usual.get(key))
        for key in same
        if values
    )
    grid = tuple((key, value_words(found)) for key, found in axes.items())
    return Configuration(shared, grid, differing, tuple(rows))


def _set_by_grid(experiment: Experiment, key: str, values: list[Any]) -> bool:
    pairs = zip(experiment.variants, values, strict=True)
    return all(dict(variant.cell).get(key) == value for variant, value in pairs)


def flattened(setting: Setting) -> Iterator[tuple[str, Any]]:
    """("train.lr", 0.1), …; the steps stay together, since their order matters."""
    for part in dataclasses.fields(setting):
        value = getattr(setting, part.name)
        if part.name == "steps":
            yield "steps", value
        else:
            for each in dataclasses.fields(value):
                found = getattr(value, each.name)
                plain = dict(found) if isinstance(found, Mapping) else found
                yield f"{part.name}.{each.name}", plain


def step_words(step: Step) -> str:
    """norm bcn (groups=8) where layer3.*"""
    options = f" ({value_words(dict(step.options))})" if step.options else ""
    return f"{step.kind} {step.name}{options}" + (f" where {step.where}" if step.where else "")


def _shown(key: str, value: Any) -> str:
    if key == "steps":
        return "; then ".join(map(step_words, value or ())) or "none"
    return str(value) if key == "model.name" else value_words(value)
