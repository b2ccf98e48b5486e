"""What `normkit lab` does: run, report, export, check and list; and what `normkit demo` does."""

from __future__ import annotations

import argparse
import dataclasses
import errno
import hashlib
import re
import sys
from collections.abc import Sequence
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import normkit
from normkit.commands.lab import RESULTS
from normkit.commands.lab_progress import progress_listener
from normkit.commands.output import check_outputs, console, screen_of, table, write_json
from normkit.core.atomic_write import check_writable
from normkit.core.messages import counted
from normkit.errors import MissingExtra, NothingToDo, OptionError, UnknownName, nearest
from normkit.lab import export as exports
from normkit.lab import sweep
from normkit.lab.experiment import Experiment, checks
from normkit.lab.experiment.fields import seeds_of
from normkit.lab.experiment.reading import read, scales
from normkit.lab.export.trackers import TrackedProgress
from normkit.lab.report import print_verdicts
from normkit.lab.report import report as write_report
from normkit.lab.results import Comparison
from normkit.lab.statistics import compare
from normkit.lab.store import DONE, FAILED, Reader, Store, StoredExperiment
from normkit.models import require

LONGEST = 60  # letters of what --set changes, in the name of a file
TIME_OVER = 3  # exit status


def run(options: argparse.Namespace) -> int:
    experiments = [experiment_of(options, file) for file in options.file]
    if options.minutes is not None and not options.minutes > 0:
        raise OptionError(f"--minutes got {options.minutes:g}, expected more than 0.")
    if len(experiments) > 1:
        several = f"{len(experiments)} experiments"
        if options.store is None:
            raise OptionError(f"{several} are trained into one store. Say which: --store FILE.")
        if options.track:
            raise OptionError(f"{several} cannot be tracked at once: --track is for one.")
    path = store_of(options, experiments[0])
    pages = [beside(path, experiment, ".html", options) for experiment in experiments]
    return _train_and_show(experiments, path, pages, options)


def demo(options: argparse.Namespace) -> int:
    experiment = demo_experiment()
    path = store_of(options, experiment)
    if options.fresh:
        with Store(path) as store:
            store.forget(run.id for run in experiment.runs())
    return _train_and_show([experiment], path, [beside(path, experiment, ".html")], options)


def report(options: argparse.Namespace) -> int:
    experiment = experiment_of(options)
    path = store_of(options, experiment)
    with Reader(path) as store:
        page = options.out or _where_writable(beside(path, experiment, ".html", options))
        write_json(options, _show(experiment, store, page, options))
    return 0


def _where_writable(page: Path) -> Path:
    """The page beside its results; in the working directory, if these are read-only."""
    try:
        check_writable(page)
    except PermissionError:
        return Path(page.name)
    except OSError as error:
        return Path(page.name) if error.errno == errno.EROFS else page
    return page


def export(options: argparse.Namespace) -> int:
    experiment = experiment_of(options)
    path = store_of(options, experiment)
    ending = exports.FORMATS[options.format]
    out = options.out or beside(path, experiment, ending, options)
    with Reader(path) as store:
        check_outputs([out], options.force or options.out is None)
        results = store.results(run.id for run in experiment.runs())
        failures = _failures(experiment, store)
    comparisons = compare(experiment, results, failures) if options.format == "latex" else []
    exports.write(
        experiment, results, comparisons, out, options.format, per=options.per, failures=failures
    )
    screen_of(options).print(f"Written: {out}", markup=False, soft_wrap=True)
    write_json(options, exports.rows(experiment, results, options.per, failures))
    return 0


def check(options: argparse.Namespace) -> int:
    experiment = experiment_of(options)
    if options.scale is None:  # those that nobody has asked for may hold mistakes as well
        for scale in scales(path := find(options.file)):
            read(path, scale)
    cautions = _check(experiment)
    runs, cells = experiment.runs(), experiment.cells()
    names = list(dict.fromkeys(variant.name for variant in experiment.variants))
    epochs = sum(run.setting.train.epochs for run in runs)
    where = f" in {len(cells)} cells" if len(cells) > 1 else ""
    scale = f" at scale {experiment.scale}" if experiment.scale else ""
    screen = screen_of(options)
    screen.print(f"“{experiment.title}”{scale} can be trained.", markup=False)
    screen.print(
        f"{counted(len(names), 'variant')} ({', '.join(names)}){where} × "
        f"{counted(len(experiment.seeds), 'seed')}: {counted(len(runs), 'run')}, "
        f"{counted(epochs, 'epoch')}. Baseline: {experiment.baseline}.",
        markup=False,
    )
    cautions += checks.different_ground(experiment)
    for caution in cautions:
        screen.print(f"! {caution}", markup=False, soft_wrap=True)
    facts = {
        "experiment": experiment.name,
        "title": experiment.title,
        "scale": experiment.scale,
        "variants": names,
        "baseline": experiment.baseline,
        "cells": len(cells),
        "seeds": experiment.seeds,
        "runs": len(runs),
        "epochs": epochs,
        "cautions": cautions,
    }
    write_json(options, facts)
    return 0


def list_experiments(options: argparse.Namespace) -> int:
    experiments = shipped()
    if not experiments:
        raise NothingToDo("No experiments are installed. Try the path of a TOML file.")
    rows = []
    for name, path in experiments.items():
        experiment = read(path)
        rows.append((name, experiment.source, experiment.title, ", ".join(scales(path))))
    head = ("name", "source", "title", "scales")
    screen_of(options).print(table("Experiments: normkit lab run NAME", head, rows))
    write_json(options, [dict(zip(head, row, strict=True)) for row in rows])
    return 0


# ---------------------------------------------------------------- which experiment, and where


def experiment_of(options: argparse.Namespace, file: str | None = None) -> Experiment:
    """The experiment that the arguments name, or one of several, with their seeds and metric."""
    path = find(options.file if file is None else file)
    experiment = read(path, options.scale, options.metric, options.overrides)
    if options.seeds is not None:
        experiment = dataclasses.replace(experiment, seeds=_seeds(options.seeds))
    return experiment


def demo_experiment() -> Experiment:
    with as_file(files("normkit.lab") / "demo.toml") as file:
        return read(file)


def store_of(options: argparse.Namespace, experiment: Experiment) -> Path:
    chosen: Path | None = options.store
    return chosen or RESULTS / f"{experiment.name}.sqlite"


def beside(
    store: Path, experiment: Experiment, ending: str, options: argparse.Namespace | None = None
) -> Path:
    """A file about an experiment: of a scale, of what --set changes, of a metric asked for."""
    metric = None if options is None else options.metric
    changed = re.sub(r"[^\w.=-]+", "_", ",".join(experiment.overrides))
    if len(changed) > LONGEST:
        changed = f"set-{hashlib.sha256(changed.encode()).hexdigest()[:8]}"
    parts = [experiment.name, experiment.scale, changed, metric or ""]
    return store.with_name("-".join(filter(None, parts)) + ending)


def find(reference: str) -> Path:
    """A file, or an experiment that comes with normkit, by its name."""
    path = Path(reference)
    if path.suffix or path.exists() or len(path.parts) > 1:
        return path
    experiments = shipped()
    if reference not in experiments:
        hint = nearest(reference, experiments) if experiments else "Try the path of a TOML file."
        raise UnknownName(f"There is no experiment {reference!r}. {hint}")
    return experiments[reference]


def shipped() -> dict[str, Path]:
    """The experiments of normkit by name: as installed, or beside the source."""
    package = Path(normkit.__file__).parent
    for folder in (package / "experiments", package.parents[1] / "experiments"):
        if paths := sorted(folder.glob("*.toml")):
            return {path.stem: path for path in paths}
    return {}


def _seeds(text: str) -> tuple[int, ...]:
    try:
        numbers = [int(each) for each in text.split(",")]
    except ValueError:
        raise OptionError(f"--seeds got {text!r}. Expected a number, or a list as 1,2,7.") from None
    return seeds_of(numbers if "," in text else numbers[0])


# ---------------------------------------------------------------- training and showing


def _train_and_show(
    experiments: Sequence[Experiment],
    path: Path,
    pages: Sequence[Path],
    options: argparse.Namespace,
) -> int:
    listener = progress_listener()
    if options.track:  # a name that is wrong, or a package that is missing, is told first
        listener = TrackedProgress(experiments[0], options.track, listener)
    for experiment in () if options.no_check else experiments:
        for caution in _check(_missing(experiment, path)):
            print(f"! {caution}", file=sys.stderr)
    with Store(path) as store:
        for experiment in experiments:
            store.remember(StoredExperiment.of(experiment, _text(experiment)))
        sweep.run(
            experiments,
            store,
            workers=options.workers,
            device=options.device,
            together=options.together,
            seconds=None if options.minutes is None else 60 * options.minutes,
            engine=options.engine,
            progress=listener,
        )
        labels = sweep.run_labels(*experiments)
        states = store.status(labels)
        facts = [
            _facts(experiment, store, ())
            if options.no_report
            else _show(experiment, store, page, options)
            for experiment, page in zip(experiments, pages, strict=True)
        ]
        write_json(options, facts[0] if len(facts) == 1 else facts)
    failed = [each for each in states.values() if each.state == FAILED]
    if failed:
        print(f"normkit: {len(failed)} of {len(states)} runs failed:", file=sys.stderr)
        for each in failed:
            print(f"  {labels[each.run]}: {each.reason}", file=sys.stderr)
        return 1
    return 0 if all(each.state == DONE for each in states.values()) else TIME_OVER


def _text(experiment: Experiment) -> str:
    """The file of an experiment, for the store; "" if it is gone."""
    try:
        return experiment.path.read_text(encoding="utf-8") if experiment.path else ""
    except OSError:
        return ""


def _check(experiment: Experiment) -> list[str]:
    """An error before anything trains, or cautions; a terminal shows what is being checked."""
    try:
        screen, markup = console(stderr=True), require("rich.markup", "cli", "The lab")
    except MissingExtra:
        return checks.check(experiment)
    with screen.status("Checking") as line:
        return checks.check(experiment, lambda text: line.update(markup.escape(text)))


def _missing(experiment: Experiment, path: Path) -> Experiment:
    """The experiment without the variants that are done: only the others need data and models."""
    if not path.exists():
        return experiment
    with Reader(path) as store:
        done = {run for run, each in store.status().items() if each.state == DONE}
    kept = [
        variant
        for variant in experiment.variants
        if any(run.id not in done for run in variant.runs(experiment.seeds))
    ]
    return dataclasses.replace(experiment, variants=tuple(kept))


def _facts(
    experiment: Experiment, store: Reader, comparisons: Sequence[Comparison]
) -> dict[str, Any]:
    """What an experiment has come to, for other programs."""
    states = store.status(run.id for run in experiment.runs())
    labels = sweep.run_labels(experiment)
    return {
        "experiment": experiment.name,
        "title": experiment.title,
        "scale": experiment.scale,
        "metric": experiment.metric,
        "baseline": experiment.baseline,
        "runs": len(experiment.runs()),
        "done": sum(each.state == DONE for each in states.values()),
        "failed": {
            str(labels[run]): each.reason for run, each in states.items() if each.state == FAILED
        },
        "comparisons": [
            {**dataclasses.asdict(each), "cell": dict(each.cell)} for each in comparisons
        ],
    }


def _failures(experiment: Experiment, store: Reader) -> dict[str, str]:
    """Why each run that an error has ended gave no result, by its id."""
    states = store.status(run.id for run in experiment.runs())
    return {run: each.reason for run, each in states.items() if each.state == FAILED}


def _show(
    experiment: Experiment, store: Reader, page: Path, options: argparse.Namespace
) -> dict[str, Any]:
    """Write the page and print the verdicts; on a machine without the packages, say so."""
    ids = [run.id for run in experiment.runs()]
    results = store.results(ids)
    failures = _failures(experiment, store)
    try:
        comparisons = compare(experiment, results, failures)
        # before anything is printed: whoever reads our output may stop listening
        write_report(experiment, results, comparisons, page, failures=failures)
        screen = screen_of(options)
        screen.print()
        print_verdicts(experiment, results, comparisons, screen, failures)
    except MissingExtra as error:
        print(f"{len(results)} results are in {store.path}. {error}", file=sys.stderr)
        return _facts(experiment, store, ())
    screen.print(f"\nReport: {page.resolve()}", markup=False, soft_wrap=True)
    return _facts(experiment, store, comparisons)
