"""Train the claims that are missing, the headline ones first, until the time is over.

    python -m tools.evidence.train --plan                     what is missing, and what it takes
    NORMKIT_DATA=… python -m tools.evidence.train --out FOLDER --seconds 540
    python -m tools.evidence --take FOLDER/runs.jsonl         into the committed results; pages

Bring back FOLDER/runs.jsonl: one small file, a few kilobytes a run, and nothing else is in FOLDER.
A run is in it, and on the disk, as soon as it has finished, however this ends: Ctrl-C, a kill or a
limit of the machine cost only runs that had not finished. Given the same FOLDER again, also if it
was emptied, it goes on: what has finished is not trained again, and stopped runs go on from their
checkpoints. Those are in a folder for temporary files (--work), never in FOLDER: they can be a
hundred times as large as results, and are of no use elsewhere. Nor are runs trained that are
committed. To go on on another machine take the file in first, or put it into FOLDER there.

All runs are one queue for a few worker processes, each with four runs side by side: starting
processes for each experiment anew would take longer than the experiments. Needs torch and nothing
else; --take needs what the lab needs.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from normkit.errors import NormkitError
from normkit.lab.experiment import Experiment, Run
from normkit.lab.experiment.checks import check_data
from normkit.lab.results import Result
from normkit.lab.store import Store
from normkit.lab.sweep import ProgressListener, SweepPlan
from normkit.lab.sweep import run as sweep
from normkit.lab.sweep.local import worker_slots
from tools.evidence.claims import STAGES, Stage, experiment_of, ordered_runs
from tools.evidence.missing import missing_stages, plan_lines
from tools.evidence.new_runs import RUNS, NewRuns, NewRunsError, read_new_runs
from tools.evidence.results import RESULTS, in_sweep, read_all, read_sweeps

STORE = "claims.sqlite"


@dataclasses.dataclass(frozen=True)
class RunQueue(Experiment):
    """Runs of several experiments, in an order of their own."""

    ordered: tuple[Run, ...] = ()

    def runs(self) -> list[Run]:
        return list(self.ordered)


class QueueLines(ProgressListener):
    """A line for each run that ends, with the time since the start; results are kept at once."""

    def __init__(
        self, runs: Sequence[Run], names: dict[str, str], keep: Callable[[str], None]
    ) -> None:
        self.since, self.names, self.total, self.keep = time.monotonic(), names, len(runs), keep
        self.ended = 0

    def begin(self, plan: SweepPlan) -> None:
        self.ended = len(plan.done)
        self.say(f"{self.total} runs, {self.ended} done before; {plan.workers} workers")

    def finished(self, result: Result) -> None:
        self.keep(result.run)
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
    names = _names(stages)
    path = options.out / RUNS if options.out else None
    before = read_new_runs(path) if path else []
    if any(bool(each.about.get("tiny")) != bool(options.tiny) for each in before):
        raise NewRunsError(
            f"{path} has runs of another kind, with or without --tiny: another --out"
        )
    known, sweeps = (
        ({}, []) if options.tiny else (read_all(options.results), read_sweeps(options.results))
    )
    for each in before if not options.tiny else ():
        known |= {run: in_sweep(result, len(sweeps)) for run, result in each.results.items()}
        sweeps += [each.entry()] if each.results else []
    every = ordered_runs(stages)
    wanted = [run for run in every if run.id not in known]
    if not options.plan:
        worker_slots(options.workers, options.device)  # refuses a device that is not here
    if options.tiny:
        wanted = wanted[:: max(1, len(wanted) // options.tiny)][: options.tiny]
        if options.plan:
            print(f"{len(wanted)} runs of a few steps would be trained; with --plan none is.")
            return 0
    else:
        print(f"{len(every) - len(wanted)} of {len(every)} runs are there.")
        missing = missing_stages(known, sweeps, stages)
        for line in plan_lines(missing) if wanted else ():
            print(line, flush=True)
        if options.plan or not wanted:
            return 0
        for name in dict.fromkeys(stage.file for stage in missing):
            check_data(experiment_of(name))
    if path is None:
        raise NewRunsError("Where to? Expected --out FOLDER, or --plan to train nothing")
    runs = [small(run) if options.tiny else run for run in wanted]
    real = {run.id: own.id for run, own in zip(runs, wanted, strict=True)}
    out = options.out.resolve()
    named = f"normkit-evidence-{hashlib.sha256(str(out).encode()).hexdigest()[:10]}"
    work = (options.work or Path(tempfile.gettempdir()) / named).resolve()
    if out == work or out in work.parents:
        raise NewRunsError(f"{work} is in {out}, which is for {RUNS} alone: another --work")
    for folder in (options.out, work):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise NewRunsError(
                f"{folder} cannot be made: {error.strerror}. Expected a folder, or a new name"
            ) from None
    file = NewRuns(path)
    print(f"Runs go to {path} as they finish, checkpoints to {work}.", flush=True)
    file.begin(options.workers, tiny=bool(options.tiny))
    since = time.monotonic()

    with Store(work / STORE) as store:

        def keep(*done: str, found: bool = False) -> None:
            for result in store.results(done or real).values():
                own = dataclasses.replace(result, run=real[result.run])
                file.add(own, names.get(own.run, ""), time.monotonic() - since, found=found)

        keep(found=True)  # of a launcher that was killed before it could
        stopped = False
        try:
            lines = QueueLines(runs, {run: names.get(own, "") for run, own in real.items()}, keep)
            sweep(
                _queue(runs),
                store,
                workers=options.workers,
                device=options.device,
                seconds=options.seconds,
                progress=lines,
            )
        except KeyboardInterrupt:
            stopped = True
        keep()
        done = len(store.results(real))
        failed = [each for each in store.status(real).values() if each.state == "failed"]
    file.end(time.monotonic() - since)
    print(f"{done} of {len(runs)} runs are done, after {time.monotonic() - since:.0f} s.")
    if options.tiny:
        print(f"A trial: the runs in {path} are no results, and --take refuses them.", flush=True)
    else:
        print(f"Bring back {path}, then: python -m tools.evidence --take {RUNS}", flush=True)
    for state in failed:
        print(f"run {state.run} failed: {state.reason}", file=sys.stderr)
    return 130 if stopped else 0


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
    parser.add_argument("--out", type=Path, metavar="FOLDER", help=f"for {RUNS} alone")
    parser.add_argument("--work", type=Path, metavar="FOLDER", help="for checkpoints; not in --out")
    parser.add_argument(
        "--plan", action="store_true", help="say what is missing, and train nothing"
    )
    parser.add_argument(
        "--seconds",
        type=_above_zero,
        default=540.0,
        help="then stop, which may take 30 more (default: 540, for a limit of ten minutes)",
    )
    parser.add_argument("--workers", type=_count, default=6, help="processes (default: 6)")
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
