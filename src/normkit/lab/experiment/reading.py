"""From an experiment's file to an ``Experiment``; every mistake is told before anything trains.

    read("experiments/bgn-table-2.toml", scale="lab")

The file is TOML. Beside title, question, source, baseline, metric, seeds and equivalence it has
the tables [data], [model], [train] and [watch] with the fields of ``records``, a [grid] with
``along`` (see ``grid``), one [[variants]] for each thing compared (its steps, and whatever it
changes of those tables; ``only`` keeps it out of cells), [[published]] numbers (see
``published``), and [scales.NAME], such as paper, lab and desk, each laid over the rest.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from normkit.errors import NormkitError, OptionError, nearest
from normkit.lab.experiment.fields import (
    RECORDS,
    check_table,
    checked,
    laid_over,
    seeds_of,
    shorten,
    with_names,
)
from normkit.lab.experiment.grid import cells, read_axes, read_changes
from normkit.lab.experiment.overrides import Overrides
from normkit.lab.experiment.problems import BadExperiment, Problems, key_lines
from normkit.lab.experiment.published import Scope, published_of
from normkit.lab.experiment.records import Experiment, Run, Setting, Train, Variant
from normkit.lab.experiment.variants import (
    check_axes,
    check_baseline,
    check_equal,
    read_drafts,
    variants_of,
)
from normkit.lab.results import METRICS, TaskMetric
from normkit.lab.tasks import make_task
from normkit.lab.tasks.criteria import BadReference

MEASURED = "paper"  # the scale of published numbers, where a file has it
RULES = {"multiplicity": ("holm", "none"), "losses": ("unstable", "survivors")}
MOST_CELLS = 10_000  # more are a slip, and would fill the memory
TEXTS = ("title", "question", "source", "difference")
KEYS = (
    *TEXTS, "baseline", "metric", "scale", "seeds", "equivalence",
    *RULES, "looks", *RECORDS, "metrics", "grid", "along", "variants", "published", "scales",
)  # fmt: skip


def read(
    path: str | Path,
    scale: str | None = None,
    metric: str | None = None,
    overrides: Sequence[str] = (),
) -> Experiment:
    """The experiment of a file, at a scale of the file or at the one that it chooses itself.

    ``metric`` asks for another one than the file's: results hold them all. ``overrides`` are
    keys and values as the file would say them, ("train.lr = 0.05", …), laid over it.
    """
    path = Path(path)
    folder = str(path.resolve().parent)
    return replace(parse(_text(path), path.stem, scale, metric, overrides, folder), path=path)


def scales(path: str | Path) -> list[str]:
    """The names of the scales of a file, in its order."""
    path = Path(path)
    return _scale_names(_document(_text(path), path.stem))


def parse(
    text: str,
    name: str = "experiment",
    scale: str | None = None,
    metric: str | None = None,
    overrides: Sequence[str] = (),
    folder: str = "",
) -> Experiment:
    """The experiment that a text says; ``name`` is for errors and for the store.

    Own files that it names are looked for in ``folder``, then in the working directory.

    >>> experiment = parse('''
    ... baseline = "bn"
    ... seeds = 3
    ... [[variants]]
    ... name = "bn"
    ... [[variants]]
    ... name = "gn"
    ... norm = "gn"
    ... ''')
    >>> len(experiment.runs()), experiment.variants[1].setting.steps[0].name
    (6, 'gn')
    """
    document = _document(text, name)
    over = Overrides(overrides)
    problems = Problems(name, key_lines(text), over.typed)
    problems.scale = _chosen_scale(document, scale, problems)
    problems.raise_any()
    top = laid_over(_at_scale(document, problems.scale), over.table)
    _check_top(document, top, problems)

    top = _with_metrics(top, problems)

    axes = read_axes(top.get("grid", {}), problems)
    changes = read_changes(top.get("along", {}), axes, ("along",), problems)
    drafts = read_drafts(top.get("variants"), axes, problems)
    check_axes(axes, changes, drafts, problems)
    problems.raise_any()

    if (many := math.prod(len(axis.values) for axis in axes)) > MOST_CELLS:
        problems.add(("grid",), f"has {many:,} cells, expected {MOST_CELLS:,} at most.")
        problems.raise_any()
    variants = tuple(variants_of(drafts, top, axes, changes, cells(axes), folder, problems))
    check_baseline(top.get("baseline"), drafts, variants, problems)
    check_equal(variants, drafts, problems)
    over.check_effect(variants, problems)
    metrics = _metrics(variants, problems)
    problems.raise_any()
    own = top.get("metric", next(iter(metrics)))
    if own not in metrics:
        problems.add(("metric",), f"is {own!r}. {nearest(str(own), metrics)}")
        problems.raise_any()
    if metric is not None and metric not in metrics:
        raise OptionError(f"metric got {metric!r}. {nearest(metric, metrics)}")
    scope = Scope(own, metrics, variants, axes, *_at_all_scales(document, name))
    published = published_of(top.get("published", []), metric or own, scope, problems)
    elsewhere = problems.scale != MEASURED and MEASURED in _scale_names(document)
    if elsewhere or over.change_training:
        published = ()  # measured on other data, or with other training: no number to stand by ours
    problems.raise_any()
    return Experiment(
        name=name,
        variants=variants,
        seeds=seeds_of(top.get("seeds", 1)),
        baseline=top["baseline"],
        metric=metric or own,
        scale=problems.scale,
        equivalence=float(top.get("equivalence", Experiment.equivalence)),
        **{key: top.get(key, choices[0]) for key, choices in RULES.items()},
        looks=tuple(top.get("looks", ())),
        published=published,
        overrides=over.texts,
        metrics=metrics,
        **{"title": name, **{key: top[key].strip() for key in TEXTS if key in top}},
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")  # some editors begin a file with a mark
    except FileNotFoundError:
        near = sorted(each.stem for each in path.parent.glob("*.toml"))
        hint = nearest(path.stem, near) if near else "There is no .toml file in that folder."
        raise BadExperiment(f"There is no experiment {path}. {hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadExperiment(f"{path} cannot be read: {error}.") from error


def _document(text: str, name: str) -> dict[str, Any]:
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        what, _, place = str(error).partition(" (at ")
        line = re.match(r"line (\d+), column (\d+)", place)
        where = line.group() if line else f"line {len(text.splitlines())}, at its end"
        raise BadExperiment(f"{name}, {where}: not valid TOML: {what}.") from error
    scales = document.get("scales")
    if isinstance(scales, Mapping):
        tables = {k: with_names(v) if isinstance(v, Mapping) else v for k, v in scales.items()}
        document["scales"] = tables
    return with_names(document)


def _with_metrics(top: dict[str, Any], problems: Problems) -> dict[str, Any]:
    """The table [metrics] belongs to the task."""
    tables = top.get("metrics", {})
    if not isinstance(tables, Mapping) or not all(isinstance(t, Mapping) for t in tables.values()):
        problems.add(("metrics",), 'expects tables, such as [metrics.f1] with use = "…".')
        return top
    task = top.get("task", {})
    if not tables or not isinstance(task, Mapping):
        return top
    return {**top, "task": laid_over(task, {"metrics": tables})}


def _metrics(variants: Sequence[Variant], problems: Problems) -> Mapping[str, TaskMetric]:
    """Of the tasks of all variants; one that only some of them have cannot be compared."""
    found: list[Mapping[str, TaskMetric]] = []
    distinct: dict[str, Variant] = {}
    for variant in variants:
        setting, train = variant.setting, variant.setting.train
        loss = Train(loss=train.loss, loss_options=train.loss_options)
        key = Run(Setting(task=setting.task, train=loss, code=setting.code), 0).id
        distinct.setdefault(key, variant)
    for variant in distinct.values():
        try:
            found.append(make_task(variant.setting).metrics)
        except BadReference as error:
            problems.add(error.key, f"cannot be used: {error.reason}")
        except NormkitError as error:
            problems.add(("task", "name"), f"cannot be used: {error}")
    first, *others = found or [METRICS]
    shared = {name: each for name, each in first.items() if all(name in o for o in others)}
    if not shared:
        problems.add(("task", "name"), "differs between variants, which share no metric.")
    return shared or METRICS


def _check_top(document: Mapping[str, Any], top: Mapping[str, Any], problems: Problems) -> None:
    for key in [*top, *document]:
        if key not in KEYS or (key in ("scale", "scales") and key in top):
            problems.unknown((key,), KEYS)
    for key in (*TEXTS, "baseline", "metric"):
        if key in top and not isinstance(top[key], str):
            problems.add((key,), f"expects a string, got {shorten(top[key])}.")
    try:
        seeds_of(top.get("seeds", 1))
    except BadExperiment as error:
        problems.add(("seeds",), str(error).removeprefix("seeds "))
    for key, choices in RULES.items():
        if (rule := top.get(key, choices[0])) not in choices:
            problems.add((key,), f"is {rule!r}. {nearest(str(rule), choices)}")
    _check_looks(top, problems)
    margin = checked(float, top.get("equivalence", 1), ("equivalence",), problems)
    if margin is not None and not 0 < margin <= 1:
        problems.add(("equivalence",), "expects a fraction, such as 0.005 for half a percent.")
    for section, record in RECORDS.items():
        check_table(record, top.get(section, {}), (section,), problems)


def _check_looks(top: Mapping[str, Any], problems: Problems) -> None:
    looks = top.get("looks", [])
    whole = isinstance(looks, list) and all(type(each) is int for each in looks)
    if not whole or list(looks) != sorted({*looks}) or min(looks, default=2) < 2:
        wanted = "numbers of seeds from 2 up, in order, such as [5, 10, 20]"
        problems.add(("looks",), f"expects {wanted}, got {shorten(looks)}.")
        return
    try:
        seeds = len(seeds_of(top.get("seeds", 1)))
    except BadExperiment:
        return
    if looks and seeds > looks[-1]:
        problems.add(("looks",), f"end at {looks[-1]} seeds, and the file asks for {seeds}.")


def _scale_names(document: Mapping[str, Any]) -> list[str]:
    table = document.get("scales", {})
    return list(table) if isinstance(table, Mapping) else []


def _chosen_scale(document: Mapping[str, Any], asked: str | None, problems: Problems) -> str:
    """The scale to use: the one asked for, else the file's own choice, else none."""
    names = _scale_names(document)
    own = document.get("scale", "")

    def hint(name: str) -> str:
        return nearest(name, names) if names else "The file has no [scales.…]."

    if own and own not in names:
        problems.add(("scale",), f"is {own!r}. {hint(str(own))}")
    if asked is not None and asked not in names:
        problems.add((), f"there is no scale {asked!r}. {hint(asked)}")
    return asked if asked is not None else str(own)


def _at_scale(document: Mapping[str, Any], scale: str) -> dict[str, Any]:
    """The file as it reads at a scale."""
    rest = {key: value for key, value in document.items() if key not in ("scales", "scale")}
    over = document.get("scales", {}).get(scale, {}) if scale else {}
    return laid_over(rest, over) if isinstance(over, Mapping) else rest


def _at_all_scales(
    document: Mapping[str, Any], name: str
) -> tuple[frozenset[str], dict[str, frozenset[Any]]]:
    """The names of variants and the values of axes at all scales of the file."""
    names: set[str] = set()
    values: dict[str, frozenset[Any]] = {}
    for scale in ["", *_scale_names(document)]:
        top = _at_scale(document, scale)
        for axis in read_axes(top.get("grid", {}), Problems(name, {})):
            values[axis.name] = values.get(axis.name, frozenset()) | set(axis.values)
        tables = [each for each in top.get("variants", []) if isinstance(each, Mapping)]
        names |= {str(each.get("name")) for each in tables}
    return frozenset(names), values
