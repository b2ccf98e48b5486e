"""Results as columns: the same for CSV and Parquet."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from normkit.lab.experiment import Experiment, Setting, Step, Variant
from normkit.lab.export.columns import FLAG, INTEGER, INTEGERS, NUMBER, TEXT, Column, fitting
from normkit.lab.report.settings import flattened
from normkit.lab.results import DIVERGED, Epoch, Result

NOT_RUN = "not run"


@dataclass(frozen=True)
class Row:
    """A run of a variant, and one of its epochs where rows are epochs."""

    variant: Variant
    seed: int
    run: str
    result: Result | None
    epoch: Epoch | None = None


def table(experiment: Experiment, results: Mapping[str, Result], per: str = "run") -> list[Column]:
    """A row for each run, finished or not; or for each epoch of the finished ones."""
    rows = list(_runs(experiment, results))
    if per == "epoch":
        rows = [
            dataclasses.replace(row, epoch=epoch)
            for row in rows
            if row.result is not None
            for epoch in row.result.epochs
        ]
        return [*_who(experiment, rows), *_epoch_columns(rows)]
    return [
        *_who(experiment, rows),
        *_run_columns(experiment, rows),
        *_settings(rows),
        *_environment(rows),
    ]


def _runs(experiment: Experiment, results: Mapping[str, Result]) -> Iterator[Row]:
    for variant in experiment.variants:
        for run in variant.runs(experiment.seeds):
            yield Row(variant, run.seed, run.id, results.get(run.id))


def _who(experiment: Experiment, rows: Sequence[Row]) -> list[Column]:
    """What identifies a row."""
    axes = dict.fromkeys(path for variant in experiment.variants for path, _ in variant.cell)
    return [
        Column("experiment", TEXT, [experiment.name] * len(rows)),
        Column("scale", TEXT, [experiment.scale] * len(rows)),
        Column("variant", TEXT, [row.variant.name for row in rows]),
        Column("baseline", FLAG, [row.variant.name == experiment.baseline for row in rows]),
        *(fitting(axis, [dict(row.variant.cell).get(axis) for row in rows]) for axis in axes),
        Column("seed", INTEGER, [row.seed for row in rows]),
        Column("run", TEXT, [row.run for row in rows]),
        Column("status", TEXT, [r.result.status if r.result else NOT_RUN for r in rows]),
    ]


def _run_columns(experiment: Experiment, rows: Sequence[Row]) -> list[Column]:
    def column(name: str, kind: str, of: Callable[[Result], Any]) -> Column:
        return Column(name, kind, [of(r.result) if r.result else None for r in rows])

    return [
        Column("metric", TEXT, [experiment.metric] * len(rows)),
        column("score", NUMBER, lambda r: r.score(experiment.metric)),
        column("test_accuracy", NUMBER, lambda r: _score(r, "accuracy")),
        column("test_top5_accuracy", NUMBER, lambda r: _score(r, "top5_accuracy")),
        column("test_loss", NUMBER, lambda r: _score(r, "loss")),
        column("selected", INTEGERS, lambda r: list(r.selected)),
        column("epochs", INTEGER, lambda r: max((e.epoch for e in r.epochs), default=0)),
        column("seconds", NUMBER, lambda r: r.seconds),
        column("images_per_second", NUMBER, lambda r: r.images_per_second),
        column("parameters", INTEGER, lambda r: r.parameters),
        column("peak_memory", INTEGER, lambda r: r.peak_memory),
        column("note", TEXT, lambda r: r.note),
    ]


def _score(result: Result, metric: str) -> float | None:
    """None where that was not evaluated."""
    chosen = [epoch for epoch in result.epochs if epoch.epoch in result.selected]
    known = [epoch.value(metric) for epoch in chosen]
    if result.status == DIVERGED or not known or None in known:
        return None
    return result.score(metric)


def _settings(rows: Sequence[Row]) -> list[Column]:
    """Every setting that has not its default value in all of the runs."""
    usual = _flat(Setting())
    flat = {(r.variant.name, r.variant.cell): _flat(r.variant.setting) for r in rows}
    axes = {path for row in rows for path, _ in row.variant.cell}
    changed = [
        key
        for key, default in usual.items()
        if key not in axes and any(each[key] != default for each in flat.values())
    ]
    return [
        fitting(key, [flat[r.variant.name, r.variant.cell][key] for r in rows]) for key in changed
    ]


def _flat(setting: Setting) -> dict[str, Any]:
    found = dict(flattened(setting))
    found["steps"] = [_step(step) for step in setting.steps]
    return found


def _step(step: Step) -> dict[str, Any]:
    said = {"kind": step.kind, "name": step.name, "where": step.where, "options": step.options}
    return {key: value for key, value in said.items() if value}


def _environment(rows: Sequence[Row]) -> list[Column]:
    found = [row.result.environment if row.result else {} for row in rows]
    names = dict.fromkeys(name for each in found for name in each)
    return [
        Column(f"environment.{name}", TEXT, [each.get(name) for each in found]) for name in names
    ]


def _epoch_columns(rows: Sequence[Row]) -> list[Column]:
    epochs = [row.epoch for row in rows if row.epoch is not None]
    selected = [
        r.result is not None and r.epoch.epoch in r.result.selected for r in rows if r.epoch
    ]
    plain = [f.name for f in dataclasses.fields(Epoch) if f.name not in ("epoch", "measures")]
    names = dict.fromkeys(name for epoch in epochs for name in epoch.measures)
    return [
        Column("epoch", INTEGER, [epoch.epoch for epoch in epochs]),
        Column("selected", FLAG, selected),
        *(Column(name, NUMBER, [getattr(epoch, name) for epoch in epochs]) for name in plain),
        *(fitting(f"measures.{n}", [epoch.measures.get(n) for epoch in epochs]) for n in names),
    ]
