"""Train what an experiment lacks, and show what it found.

Everything is checked before anything trains. The same command goes on where it was stopped, by
Ctrl-C, a crash or a full disk, and comes to the same numbers; it may also run several times at
once on one store."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

from normkit.commands import lab_subject
from normkit.commands.lab_answer import show
from normkit.commands.lab_checking import check
from normkit.commands.lab_progress import watcher
from normkit.lab import sweep
from normkit.lab.experiment import Experiment
from normkit.lab.store import DONE, FAILED, Reader, Store

NAME = "run"
ALIASES = ("resume",)
HELP = "train what is missing, then show the answer"
EXAMPLES = f"""\
examples:
  normkit lab run my.toml
  normkit lab run my.toml --scale paper --device cuda
  normkit lab run my.toml --seeds 15 --workers 4 --no-report
  normkit lab run my.toml --engine ray         on the machines of a Ray cluster

{lab_subject.WHERE}
Where there is no GPU, each core of the CPU trains one run; on a GPU, small runs of one variant
train side by side.

exit status: 0 done; 1 runs failed, which are named, and tried again the next time; 2 bad
arguments or input; 130 interrupted"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    lab_subject.add_experiment(parser)
    add_training(parser)


def add_training(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--workers", type=int, metavar="K", help="processes (default: one a core, or one a GPU)")
    add("--device", metavar="NAME", help="cpu, cuda or cuda:0 (default: the GPUs if there are any)")
    add("--engine", choices=sweep.ENGINES, default="local", help="default local")
    add("--no-report", action="store_true", help="only train")


def run(options: argparse.Namespace) -> int:
    experiment = lab_subject.experiment_of(options)
    path = lab_subject.store_of(options, experiment)
    page = lab_subject.beside(path, experiment, ".html", options.metric)
    return train_and_show(experiment, path, page, options)


def train_and_show(
    experiment: Experiment, path: Path, page: Path, options: argparse.Namespace
) -> int:
    check(_missing(experiment, path))
    with Store(path) as store:
        sweep.run(
            experiment,
            store,
            workers=options.workers,
            device=options.device,
            engine=options.engine,
            progress=watcher(),
        )
        states = store.status(run.id for run in experiment.runs())
        if not options.no_report:
            show(experiment, store, page)
    failed = [each for each in states.values() if each.state == FAILED]
    if failed:
        names = sweep.run_labels(experiment)
        print(f"normkit: {len(failed)} of {len(states)} runs failed:", file=sys.stderr)
        for each in failed:
            print(f"  {names[each.run]}: {each.reason}", file=sys.stderr)
    return 1 if failed else 0


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
