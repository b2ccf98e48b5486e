"""How far experiments are: what is done, what is being trained, and what failed and why."""

from __future__ import annotations

import argparse
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from normkit.commands.lab import RESULTS
from normkit.commands.lab_actions import experiment_of, store_of
from normkit.commands.output import screen_of, table, write_json
from normkit.core.messages import counted
from normkit.errors import NothingToDo
from normkit.lab.experiment import Experiment
from normkit.lab.results import COLLAPSED, DIVERGED, Result
from normkit.lab.store import CLAIMED, DONE, FAILED, WAITING, Reader, RunState
from normkit.lab.store.owner import describe_owner
from normkit.lab.sweep import RunLabel, run_labels
from normkit.lab.train.checkpoint import StaleCheckpoint, checkpoint_place

HEAD = ("variant", "done", "diverged", "collapsed", "training", "waiting", "failed", "mean")


def status(options: argparse.Namespace) -> int:
    if options.file is None:
        return _stores(options)
    experiment = experiment_of(options)
    names = run_labels(experiment)
    with Reader(store_of(options, experiment)) as store:
        states = {run: RunState(run, WAITING) for run in names} | store.status(names)
        results = store.results(names)
        others = sum(each.state == DONE for run, each in store.status().items() if run not in names)
        training = [
            (str(names[run]), *_last(store, run, experiment), describe_owner(each.owner or ""))
            for run, each in states.items()
            if each.state == CLAIMED
        ]
        begun = [
            (str(names[run]), reached, _last(store, run, experiment)[1])
            for run, each in states.items()
            if each.state != DONE
            and each.state != CLAIMED
            and (reached := _reached(store, run, names[run].epochs))
        ]
    screen = screen_of(options)
    rows = list(_rows(experiment, names, states, results))
    screen.print(f"{experiment.title}: {_count(states)}.\n", markup=False, soft_wrap=True)
    screen.print(table("Variants", HEAD, rows))
    if others:
        screen.print(
            f"The store also has {others} results that this experiment does not ask for: of other "
            "scales or seeds, or of the file as it was before a change.",
            soft_wrap=True,
        )
    if training:
        screen.print(
            table("Being trained", ("run", "epoch", f"test {experiment.metric}", "by"), training)
        )
    if begun:
        head = ("run", "checkpoint", f"test {experiment.metric}")
        screen.print(table("Begun, to go on from a checkpoint", head, begun))
    failed = [(names[run], each.reason) for run, each in states.items() if each.state == FAILED]
    if failed:
        screen.print(table("Failed: normkit lab log RUN has more", ("run", "reason"), failed))
    facts = {
        "experiment": experiment.name,
        "variants": [dict(zip(HEAD, row, strict=True)) for row in rows],
        "training": [str(names[run]) for run, each in states.items() if each.state == CLAIMED],
        "begun": {run: reached for run, reached, _ in begun},
        "failed": {str(run): reason for run, reason in failed},
    }
    write_json(options, facts)
    return 0


def _rows(
    experiment: Experiment,
    names: Mapping[str, RunLabel],
    states: Mapping[str, RunState],
    results: Mapping[str, Result],
) -> Iterator[tuple[object, ...]]:
    for variant in dict.fromkeys(entry.variant for entry in names.values()):
        own = [run for run, entry in names.items() if entry.variant == variant]
        kinds = Counter(states[run].state for run in own)
        own_results = [results[run] for run in own if run in results]
        outcomes = Counter(each.outcome(experiment.metric) for each in own_results)
        scores = [  # as on the page: what was lost is counted, not averaged
            each.score(experiment.metric) or 0.0
            for each in own_results
            if each.outcome(experiment.metric) == DONE
        ]
        mean = statistics.fmean(scores) if scores else None
        form = _form(experiment)
        yield (
            variant,
            f"{kinds[DONE]}/{len(own)}",
            outcomes[DIVERGED] or None,
            outcomes[COLLAPSED] or None,
            kinds[CLAIMED] or None,
            kinds[WAITING] or None,
            kinds[FAILED] or None,
            None if mean is None else form.format(mean),
        )


def _last(store: Reader, run: str, experiment: Experiment) -> tuple[object, object]:
    """The last epoch that a run has told, and its score."""
    told = store.epochs(run)
    if not told:
        return None, None
    score = told[-1].value(experiment.metric)
    return told[-1].epoch, None if score is None else _form(experiment).format(score)


def _form(experiment: Experiment) -> str:
    return "{:.2%}" if experiment.metrics[experiment.metric].percent else "{:.4f}"


def _reached(store: Reader, run: str, epochs: int) -> str:
    """How far the checkpoint of a run has come; "" if there is none that can be used."""
    path = store.checkpoint(run)
    if not path.exists():
        return ""
    try:
        done, steps = checkpoint_place(path)
    except (StaleCheckpoint, OSError):
        return ""
    more = f", {counted(steps, 'step')} of the next" if steps else ""
    return f"{done} of {counted(epochs, 'epoch')}{more}"


def _count(states: Mapping[str, RunState]) -> str:
    kinds = Counter(each.state for each in states.values())
    words = {CLAIMED: "being trained", WAITING: "waiting", FAILED: "failed"}
    more = "".join(f", {kinds[kind]} {word}" for kind, word in words.items() if kinds[kind])
    return f"{kinds[DONE]} of {len(states)} runs done{more}"


def _stores(options: argparse.Namespace) -> int:
    paths: list[Path] = [options.store] if options.store else sorted(RESULTS.glob("*.sqlite"))
    if not paths:
        raise NothingToDo(f"There is no store in {RESULTS}/. Try normkit lab run FILE, or --store.")
    rows = []
    for path in paths:
        with Reader(path) as store:
            states = store.status()
        alive = sorted({describe_owner(each.owner) for each in states.values() if each.owner})
        rows.append((path, _count(states), ", ".join(alive)))
    head = ("store", "runs", "being trained by")
    screen_of(options).print(table("Stores", head, rows))
    write_json(options, [dict(zip(head, row, strict=True)) for row in rows])
    return 0
