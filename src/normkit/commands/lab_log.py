"""One run, looked at: where it stands, how it was made, and the log of a failure."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from normkit.commands.lab import RESULTS
from normkit.commands.lab_actions import experiment_of, store_of
from normkit.commands.output import screen_of, table, write_json
from normkit.errors import NothingToDo, UnknownName, nearest
from normkit.lab.results import Result
from normkit.lab.store import WAITING, Reader, RunState, StoredExperiment
from normkit.lab.sweep import outcome, run_labels

PREFIX = re.compile(r"[0-9a-f]{4,20}")
SHOWN = 8  # of several runs that are meant


@dataclass(frozen=True)
class NamedRun:
    """A run of a store, by the name under which people know it."""

    store: Path
    id: str
    name: str  # "gn, seed 3"; "" if no experiment of the store names it
    metric: str = "accuracy"
    percent: bool = True


def log(options: argparse.Namespace) -> int:
    run = _chosen(options)
    with Reader(run.store) as store:
        state = store.status([run.id]).get(run.id, RunState(run.id, WAITING))
        result = store.results([run.id]).get(run.id)
        text = store.log(run.id)
        epochs = result.epochs if result else tuple(store.epochs(run.id))
    screen = screen_of(options)
    screen.print(f"{run.name or run.id}: {_standing(run, state, result)}", markup=False)
    rows = list(_facts(run, result))
    screen.print(table("How it was made" if result else "Which run", ("what", ""), rows))
    if epochs:
        head = ("epoch", "training loss", "test loss", f"test {run.metric}")
        shown = [
            (each.epoch, *map(_short, (each.train_loss, each.test_loss, each.value(run.metric))))
            for each in epochs
        ]
        left_out = f", the last {SHOWN} of {len(shown)}" if len(shown) > SHOWN else ""
        screen.print(table(f"Epochs{left_out}", head, shown[-SHOWN:]))
    if text:
        screen.print("Log of its last failure", markup=False)
        screen.print(text.rstrip(), markup=False, soft_wrap=True)
    facts = {
        "run": run.id,
        "name": run.name,
        "store": run.store,
        "state": state.state,
        "reason": state.reason,
        "log": text,
        "result": dataclasses.asdict(result) if result else None,
    }
    write_json(options, facts)
    return 0


def _standing(run: NamedRun, state: RunState, result: Result | None) -> str:
    if result is not None:
        return outcome(result, run.metric, run.percent)
    return f"{state.state}: {state.reason}" if state.reason else state.state


def _facts(run: NamedRun, result: Result | None) -> Iterator[tuple[str, str]]:
    yield "run", run.id
    yield "store", str(run.store)
    if result is not None:
        if result.note:
            yield "note", result.note
        yield from result.texts.items()
        yield from {**result.provenance, **result.environment}.items()


def _short(value: float | None) -> str | None:
    return None if value is None else f"{value:.4g}"


# ---------------------------------------------------------------- which run is meant


def _chosen(options: argparse.Namespace) -> NamedRun:
    """The one run that is meant by the beginning of its id, or by variant and seed."""
    runs = list(_from_file(options) if options.file else _from_stores(options))
    wanted: str = options.which
    exact = [run for run in runs if run.id == wanted or _plain(run.name) == _plain(wanted)]
    meant = exact or [
        run
        for run in runs
        if (PREFIX.fullmatch(wanted) and run.id.startswith(wanted))
        or _plain(run.name).startswith(f"{_plain(wanted)},")
    ]
    if not meant:
        names = dict.fromkeys(run.name for run in runs if run.name)
        hint = nearest(wanted, names) if names else "Try the beginning of an id."
        raise UnknownName(f"There is no run {wanted!r}. {hint}")
    distinct = {(run.store, run.id): run for run in meant}
    if len(distinct) > 1:
        shown = [f"{run.id} ({run.name or run.store})" for run in distinct.values()]
        more = f", and {len(shown) - SHOWN} more" * (len(shown) > SHOWN)
        raise UnknownName(
            f"{wanted!r} may mean {len(shown)} runs: {', '.join(shown[:SHOWN])}{more}. Try more "
            "of the id, variant and seed ('gn, seed 3'), or --file or --store."
        )
    return next(iter(distinct.values()))


def _plain(name: str) -> str:
    """'gn seed 3', 'gn,3' and 'gn, seed 3' are one name."""
    return re.sub(r"(,\s*|\s+)(seed\s*)?(?=\d+$)", ",", name.strip())


def _from_file(options: argparse.Namespace) -> Iterator[NamedRun]:
    experiment = experiment_of(options)
    path = store_of(options, experiment)
    for run, label in run_labels(experiment).items():
        percent = experiment.metrics[experiment.metric].percent
        yield NamedRun(path, run, str(label), experiment.metric, percent)


def _from_stores(options: argparse.Namespace) -> Iterator[NamedRun]:
    """The runs of all stores; of experiments that were changed, the names of the latest."""
    paths: list[Path] = [options.store] if options.store else sorted(RESULTS.glob("*.sqlite"))
    if not paths:
        raise NothingToDo(f"There is no store in {RESULTS}/. Try --store, or --file.")
    for path in paths:
        with Reader(path) as store:
            ids = list(store.status())
            named: dict[str, NamedRun] = {}
            for experiment in store.experiments():
                about = experiment.metric, experiment.percent
                for run, name in _labels(experiment):
                    named[run] = NamedRun(path, run, name, *about)
        for run in ids:
            yield named.get(run) or NamedRun(path, run, "")


def _labels(experiment: StoredExperiment) -> Iterator[tuple[str, str]]:
    for variant in experiment.variants:
        for seed, run in zip(experiment.seeds, variant.runs, strict=True):
            yield run, f"{variant.label}, seed {seed}"
