"""Results as typed columns: the same for CSV and Parquet."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from normkit.lab.experiment import Experiment, Setting, Variant
from normkit.lab.report.tables import flattened
from normkit.lab.results import DIVERGED, FAILED, Comparison, Epoch, Result

TEXT, INTEGER, NUMBER, FLAG = "text", "integer", "number", "flag"
INTEGERS, NUMBERS = "integers", "numbers"  # lists
NOT_RUN = "not run"
# of a comparison's fields; all others are numbers
FIELD_KINDS = {"str": TEXT, "int": INTEGER, "int | None": INTEGER}


@dataclass(frozen=True)
class Column:
    """A name, what its values are, and a value for each row; None where there is none."""

    name: str
    kind: str
    values: list[Any]


@dataclass(frozen=True)
class RunRecord:
    """A run of a variant, and one of its epochs where rows are epochs."""

    variant: Variant
    seed: int
    run: str
    result: Result | None
    epoch: Epoch | None = None
    failed: bool = False  # ended by an error, without a result


def result_columns(
    experiment: Experiment,
    results: Mapping[str, Result],
    per: str = "run",
    failures: Collection[str] = (),
) -> list[Column]:
    """A row for each run, finished or not; or for each epoch of the finished ones."""
    rows = [
        RunRecord(variant, run.seed, run.id, results.get(run.id), failed=run.id in failures)
        for variant in experiment.variants
        for run in variant.runs(experiment.seeds)
    ]
    if per == "epoch":
        rows = [
            dataclasses.replace(row, epoch=epoch)
            for row in rows
            if row.result is not None
            for epoch in row.result.epochs
        ]
        return [*_identity(experiment, rows), *_epoch_columns(rows)]
    environments = [row.result.environment if row.result else {} for row in rows]
    names = dict.fromkeys(name for each in environments for name in each)
    return [
        *_identity(experiment, rows),
        *_run_columns(experiment, rows),
        *_settings(rows),
        *(Column(f"environment.{n}", TEXT, [each.get(n) for each in environments]) for n in names),
    ]


def comparison_columns(experiment: Experiment, comparisons: Sequence[Comparison]) -> list[Column]:
    """A row for each comparison, with every number behind its verdict."""
    axes = dict.fromkeys(path for each in comparisons for path, _ in each.cell)
    fields = [field for field in dataclasses.fields(Comparison) if field.name != "cell"]

    def value(each: Comparison, name: str) -> Any:
        number = getattr(each, name)  # NaN: a test with too few seeds could not give it
        return None if isinstance(number, float) and math.isnan(number) else number

    return [
        Column("experiment", TEXT, [experiment.name] * len(comparisons)),
        Column("scale", TEXT, [experiment.scale] * len(comparisons)),
        Column("metric", TEXT, [experiment.metric] * len(comparisons)),
        *(fitting(axis, [dict(each.cell).get(axis) for each in comparisons]) for axis in axes),
        *(
            Column(
                field.name,
                FIELD_KINDS.get(str(field.type), NUMBER),
                [value(each, field.name) for each in comparisons],
            )
            for field in fields
        ),
    ]


def fitting(name: str, values: list[Any]) -> Column:
    """A column of the narrowest kind that holds all values; JSON text if they are mixed.

    >>> fitting("x", [1, None, 2.5]).kind, fitting("x", [1, "a"]).values
    ('number', ['1', 'a'])
    """
    given = [value for value in values if value is not None]
    if given and all(isinstance(value, bool) for value in given):
        return Column(name, FLAG, values)
    if given and all(_is_number(value) for value in given):
        whole = all(isinstance(value, int) for value in given)
        return Column(name, INTEGER if whole else NUMBER, values)
    lists = [value if isinstance(value, (list, tuple)) else [value] for value in given]
    if given and all(_is_number(each) or each is None for value in lists for each in value):
        rest = iter(lists)
        return Column(name, NUMBERS, [None if v is None else list(next(rest)) for v in values])
    return Column(name, TEXT, [_text(value) for value in values])


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _text(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return json.dumps(
        value,
        ensure_ascii=False,
        default=lambda each: dict(each) if isinstance(each, Mapping) else str(each),
    )


def _identity(experiment: Experiment, rows: Sequence[RunRecord]) -> list[Column]:
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
        Column("status", TEXT, [_outcome(experiment, r) for r in rows]),
    ]


def _outcome(experiment: Experiment, row: RunRecord) -> str:
    if row.result is None:
        return FAILED if row.failed else NOT_RUN
    return row.result.outcome(experiment.metric)


def _run_columns(experiment: Experiment, rows: Sequence[RunRecord]) -> list[Column]:
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
        *_found(rows),
    ]


def _found(rows: Sequence[RunRecord]) -> list[Column]:
    """What runs have left in words, such as the cells of a search."""
    texts = [row.result.texts if row.result else {} for row in rows]
    names = dict.fromkeys(name for each in texts for name in each)
    return [Column(f"texts.{name}", TEXT, [each.get(name) for each in texts]) for name in names]


def _score(result: Result, metric: str) -> float | None:
    """None where that was not evaluated."""
    chosen = [epoch.value(metric) for epoch in result.epochs if epoch.epoch in result.selected]
    if result.status == DIVERGED or not chosen or None in chosen:
        return None
    return result.score(metric)


def _settings(rows: Sequence[RunRecord]) -> list[Column]:
    """Every setting that has not its default value in all of the runs."""
    defaults = _flat(Setting())
    flat = {(r.variant.name, r.variant.cell): _flat(r.variant.setting) for r in rows}
    axes = {path for row in rows for path, _ in row.variant.cell}
    changed = [
        key
        for key, default in defaults.items()
        if key not in axes and any(each[key] != default for each in flat.values())
    ]
    return [
        fitting(key, [flat[r.variant.name, r.variant.cell][key] for r in rows]) for key in changed
    ]


def _flat(setting: Setting) -> dict[str, Any]:
    flat = dict(flattened(setting))
    steps = [
        {"kind": step.kind, "name": step.name, "where": step.where, "options": step.options}
        for step in setting.steps
    ]
    flat["steps"] = [{key: value for key, value in step.items() if value} for step in steps]
    return flat


def _epoch_columns(rows: Sequence[RunRecord]) -> list[Column]:
    epochs = [row.epoch for row in rows if row.epoch is not None]
    selected = [
        r.result is not None and r.epoch.epoch in r.result.selected for r in rows if r.epoch
    ]
    besides = ("epoch", "measures", "metrics", "units")
    plain = [f.name for f in dataclasses.fields(Epoch) if f.name not in besides]
    metrics = dict.fromkeys(name for epoch in epochs for name in epoch.metrics)
    names = dict.fromkeys(name for epoch in epochs for name in epoch.measures)
    return [
        Column("epoch", INTEGER, [epoch.epoch for epoch in epochs]),
        Column("selected", FLAG, selected),
        *(Column(name, NUMBER, [getattr(epoch, name) for epoch in epochs]) for name in plain),
        *(Column(n, NUMBER, [epoch.metrics.get(n) for epoch in epochs]) for n in metrics),
        *(fitting(f"measures.{n}", [epoch.measures.get(n) for epoch in epochs]) for n in names),
    ]
