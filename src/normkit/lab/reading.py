"""From an experiment's file to an ``Experiment``; every mistake is told before anything trains.

    read("experiments/bgn-table-2.toml", scale="lab")

The file is TOML. Beside title, question, source, baseline, metric, seeds and equivalence it has
the tables [data], [model], [train] and [watch] with the fields of the records of ``experiment``,
a [grid] with ``along`` (see ``grid``), one [[variants]] for each thing compared (its steps, and
whatever it changes of those tables; ``only`` keeps it out of cells), [[published]] numbers (see
``reading_published``), and [scales.NAME], each laid over the rest.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from normkit.errors import OptionError, nearest
from normkit.lab import scales as scaling
from normkit.lab.experiment import Experiment
from normkit.lab.grid import Axis, cells, read_axes, read_changes
from normkit.lab.lines import key_lines
from normkit.lab.problems import BadExperiment, Problems
from normkit.lab.reading_conflicts import check_axes, check_baseline, check_equal
from normkit.lab.reading_fields import RECORDS, Unfit, check_table, fit, said
from normkit.lab.reading_published import Known, published_of
from normkit.lab.reading_variants import read_drafts, variants_of
from normkit.lab.results import METRICS
from normkit.lab.seeds import seeds_of

MOST_CELLS = 10_000  # more are a slip, and would fill the memory
TEXTS = ("title", "question", "source", "difference")
KEYS = (
    *TEXTS, "baseline", "metric", "scale", "seeds", "equivalence",
    *RECORDS, "grid", "along", "variants", "published", "scales",
)  # fmt: skip


def read(path: str | Path, scale: str | None = None, metric: str | None = None) -> Experiment:
    """The experiment of a file, at a scale of the file or at the one that it chooses itself.

    ``metric`` asks for another one than the file's: results hold them all.
    """
    path = Path(path)
    return replace(parse(_text(path), path.stem, scale, metric), path=path)


def scales(path: str | Path) -> list[str]:
    """The names of the scales of a file, in its order."""
    path = Path(path)
    return scaling.names(_document(_text(path), path.stem))


def parse(
    text: str, name: str = "experiment", scale: str | None = None, metric: str | None = None
) -> Experiment:
    """The experiment that a text says; ``name`` is for errors and for the store.

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
    problems = Problems(name, key_lines(text))
    problems.scale = scaling.chosen(document, scale, problems)
    problems.raise_any()
    said_here = scaling.merged(document, problems.scale)
    _check_top(document, said_here, problems)

    axes = read_axes(said_here.get("grid", {}), problems)
    changes = read_changes(said_here.get("along", {}), axes, ("along",), problems)
    drafts = read_drafts(said_here.get("variants"), axes, problems)
    check_axes(axes, changes, drafts, problems)
    problems.raise_any()

    if (many := math.prod(len(axis.values) for axis in axes)) > MOST_CELLS:
        problems.add(("grid",), f"has {many:,} cells, expected {MOST_CELLS:,} at most.")
        problems.raise_any()
    points = cells(axes)
    variants = tuple(variants_of(drafts, said_here, axes, changes, points, problems))
    check_baseline(said_here.get("baseline"), drafts, variants, problems)
    check_equal(variants, drafts, problems)
    own = said_here.get("metric", Experiment.metric)
    metric = own if metric is None else _known(metric)
    known = Known(own, variants, axes, *_anywhere(document, problems))
    published = published_of(said_here.get("published", []), metric, known, problems)
    problems.raise_any()
    return Experiment(
        name=name,
        variants=variants,
        seeds=seeds_of(said_here.get("seeds", 1)),
        baseline=said_here["baseline"],
        metric=metric,
        scale=problems.scale,
        equivalence=float(said_here.get("equivalence", Experiment.equivalence)),
        published=published,
        **{"title": name, **{key: said_here[key].strip() for key in TEXTS if key in said_here}},
    )


def _known(metric: str) -> str:
    if metric not in METRICS:
        raise OptionError(f"metric got {metric!r}. {nearest(metric, METRICS)}")
    return metric


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
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        what, _, place = str(error).partition(" (at ")
        line = re.match(r"line (\d+), column (\d+)", place)
        where = line.group() if line else f"line {len(text.splitlines())}, at its end"
        raise BadExperiment(f"{name}, {where}: this is no TOML: {what}.") from error


def _check_top(document: Mapping[str, Any], here: Mapping[str, Any], problems: Problems) -> None:
    for key in [*here, *document]:
        if key not in KEYS or (key in ("scale", "scales") and key in here):
            problems.unknown((key,), KEYS)
    for key in (*TEXTS, "baseline", "metric"):
        if key in here and not isinstance(here[key], str):
            problems.add((key,), f"expects a text, got {said(here[key])}.")
    if (metric := here.get("metric", "accuracy")) not in METRICS:
        problems.add(("metric",), f"is {metric!r}. {nearest(str(metric), METRICS)}")
    try:
        seeds_of(here.get("seeds", 1))
    except BadExperiment as error:
        problems.add(("seeds",), str(error).removeprefix("seeds "))
    try:
        if not 0 < fit(float, here.get("equivalence", 1)) <= 1:
            problems.add(("equivalence",), "expects a fraction, such as 0.005 for half a percent.")
    except Unfit as unfit:
        problems.add(("equivalence",), f"expects {unfit}, got {said(here['equivalence'])}.")
    for section, record in RECORDS.items():
        check_table(record, here.get(section, {}), (section,), problems)


def _anywhere(
    document: Mapping[str, Any], problems: Problems
) -> tuple[frozenset[str], dict[str, frozenset[Any]]]:
    """The names of variants and the values of axes at all scales of the file."""
    names: set[str] = set()
    values: dict[str, frozenset[Any]] = {}
    for scale in ["", *scaling.names(document)]:
        here = scaling.merged(document, scale)
        quiet = Problems(problems.name, {})
        axes: list[Axis] = read_axes(here.get("grid", {}), quiet)
        for axis in axes:
            values[axis.name] = values.get(axis.name, frozenset()) | set(axis.values)
        listed = here.get("variants", [])
        tables = [each for each in listed if isinstance(each, Mapping)]
        names |= {str(each.get("name")) for each in tables}
    return frozenset(names), values
