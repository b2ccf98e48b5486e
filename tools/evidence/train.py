"""Train the claims, the headline ones first, until the time is over; then write small files.

    NORMKIT_DATA=… python -m tools.evidence.train --out FOLDER --seconds 540
    cp FOLDER/*.json experiments/claims/results; make evidence

Runs whose results are committed are not trained again: they are in the files beside the new ones.
All runs are one queue for a few worker processes, each with four runs side by side: starting
processes for each experiment anew would take longer than the experiments. Stopped runs go on from
their checkpoints where FOLDER is given again. Needs torch and nothing else.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from normkit.core.atomic_write import write_text
from normkit.errors import NormkitError
from normkit.lab.experiment import Experiment, Run
from normkit.lab.experiment.checks import check_data
from normkit.lab.results import Result
from normkit.lab.store import Store
from normkit.lab.sweep import ProgressListener, SweepPlan
from normkit.lab.sweep import run as sweep
from tools.evidence.claims import STAGES, Stage, experiment_of, ordered_runs
from tools.evidence.results import (
    RESULTS,
    SWEEPS,
    of_sweep,
    read_all,
    read_sweeps,
    write_results,
)

STORE = "claims.sqlite"


@dataclasses.dataclass(frozen=True)
class RunQueue(Experiment):
    """Runs of several experiments, in an order of their own."""

    ordered: tuple[Run, ...] = ()

    def runs(self) -> list[Run]:
        return list(self.ordered)


class QueueLines(ProgressListener):
    """A line for each run that ends, with the time since the start."""

    def __init__(self, runs: Sequence[Run], names: dict[str, str]) -> None:
        self.since, self.names, self.total = time.monotonic(), names, len(runs)
        self.ended = 0

    def begin(self, plan: SweepPlan) -> None:
        self.ended = len(plan.done)
        self.say(f"{self.total} runs, {self.ended} done before; {plan.workers} workers")

    def finished(self, result: Result) -> None:
        self.ended += 1
        score = result.outcome("accuracy")
        if result.status == "done":
            score = f"{result.score('accuracy'):.2%} in {result.seconds:.1f} s"
        self.say(f"{self.ended}/{self.total} {self.names.get(result.run, '')}: {score}")

    def failed(self, run: str, reason: str) -> None:
        self.ended += 1
        self.say(f"{self.ended}/{self.total} {self.names.get(run, '')}: FAILED: {reason}")

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.since:6.1f} s] {text}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        return _train(options)
    except NormkitError as error:  # a name, data or a device that is not there
        parser.error(str(error))


def _train(options: argparse.Namespace) -> int:
    stages = tuple(stage for stage in STAGES if not options.only or stage.file in options.only)
    stages += tuple(Stage(name) for name in options.only if name not in {s.file for s in stages})
    if options.seeds:
        stages = tuple(dataclasses.replace(stage, seeds=options.seeds) for stage in stages)
    known = {} if options.tiny else read_all(options.results)
    every = ordered_runs(stages)
    wanted = [run for run in every if run.id not in known]
    files = list(dict.fromkeys(stage.file for stage in stages))
    if options.tiny:
        wanted = wanted[:: max(1, len(wanted) // options.tiny)]
    else:
        for file in files:
            check_data(experiment_of(file))
        print(f"{len(every) - len(wanted)} of {len(every)} runs are in {options.results}.")
    runs = [small(run) if options.tiny else run for run in wanted]
    names = _names(stages)
    options.out.mkdir(parents=True, exist_ok=True)
    since = time.monotonic()
    with Store(options.out / STORE) as store:
        queue = _queue(runs)
        stopper = threading.Timer(options.seconds, os.kill, (os.getpid(), signal.SIGINT))
        stopper.daemon = True
        try:
            stopper.start()
            sweep(
                queue,
                store,
                workers=options.workers,
                device=options.device,
                progress=QueueLines(runs, names),
            )
        except KeyboardInterrupt:
            print("The time is over.", flush=True)
        finally:
            stopper.cancel()
            results = store.results()
        seconds = time.monotonic() - since
        done = [results[run.id] for run in runs if run.id in results]
        if options.tiny:  # under the names of the runs that they stand for
            pairs = zip(runs, wanted, strict=True)
            results = {
                run.id: dataclasses.replace(results[made.id], run=run.id)
                for made, run in pairs
                if made.id in results
            }
        earlier = read_sweeps(options.out) or ([] if options.tiny else read_sweeps(options.results))
        known |= read_all(options.out)
        found = of_sweep(len(earlier), known | results, known)
        for file in files:
            write_results(experiment_of(file), found, options.out)
        new = [each for run, each in found.items() if run not in known]
        this = {
            "device": new[0].environment["device"] if new else "",
            "seconds": round(seconds, 1),
            "runs": len(new),
            "run_seconds": round(sum(result.seconds for result in new), 1),
            "workers": options.workers,
        }
        sweeps = [*earlier, this] if new else earlier
        write_text(options.out / SWEEPS, json.dumps(sweeps, indent=1) + "\n")
    print(f"{len(done)} of {len(runs)} runs are done, after {seconds:.0f} s.", flush=True)
    for state in store_failures(options.out / STORE):
        print(state, file=sys.stderr)
    return 0


def small(run: Run) -> Run:
    """The same in a few steps, to try the way of the results on a CPU."""
    setting = run.setting
    epochs = min(2, setting.train.epochs)
    train = dataclasses.replace(
        setting.train,
        epochs=epochs,
        warmup=min(setting.train.warmup, 1.0),
        batch=min(setting.train.batch, 32),
        worker_batch=setting.train.worker_batch and min(setting.train.worker_batch, 32),
        precision="float32",
        evaluate_every=min(setting.train.evaluate_every, epochs),
    )
    data = dataclasses.replace(setting.data, name="synthetic:3x16x16x10x64", subset=None)
    return Run(dataclasses.replace(setting, train=train, data=data), run.seed)


def store_failures(path: Path) -> list[str]:
    with Store(path) as store:
        failed = [each for each in store.status().values() if each.state == "failed"]
    return [f"run {each.run} failed: {each.reason}" for each in failed]


def _queue(runs: Sequence[Run]) -> RunQueue:
    first = experiment_of(STAGES[0].file)  # for what a sweep asks beside the runs
    return RunQueue(
        name="claims",
        title="The claims",
        variants=first.variants,
        seeds=first.seeds,
        baseline=first.baseline,
        ordered=tuple(runs),
    )


def _names(stages: Sequence[Stage]) -> dict[str, str]:
    names: dict[str, str] = {}
    for stage in stages:
        experiment = experiment_of(stage.file)
        for variant in experiment.variants:
            cell = ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in variant.cell)
            for run in variant.runs(experiment.seeds):
                names.setdefault(run.id, f"{stage.file}, {variant.name} ({cell}), {run.seed}")
    return names


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"got {text}, expected a whole number from 1 on")
    return int(text)


def _folder(text: str) -> Path:
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text} is no folder. An empty one: all are trained")
    return Path(text)


def _above_zero(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < threading.TIMEOUT_MAX:
        raise argparse.ArgumentTypeError(f"got {text}, expected seconds above 0")
    return seconds


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.evidence.train",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, help="a folder for the store and files")
    parser.add_argument("--seconds", type=_above_zero, default=540.0, help="stop after so many")
    parser.add_argument("--workers", type=int, default=6, help="processes (default: 6)")
    parser.add_argument("--device", help="cuda, cuda:0 or cpu (default: what there is)")
    parser.add_argument("--seeds", type=_count, help="no more than these of each experiment")
    parser.add_argument("--tiny", type=_count, metavar="N", help="N runs of a few steps, to try it")
    parser.add_argument(
        "--results",
        type=_folder,
        default=RESULTS,
        metavar="FOLDER",
        help="files of runs that are not trained again (default: the committed)",
    )
    parser.add_argument("only", nargs="*", help="experiments, such as g-ubn (default: all)")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
