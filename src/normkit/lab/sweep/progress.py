"""Who is told about a sweep while it goes on: nobody, a terminal, or lines of text."""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, zip_longest

from normkit.lab.experiment import Experiment, Run, variant_label
from normkit.lab.results import DIVERGED, Result
from normkit.lab.sweep.messages import Progressed

RECENT = 16  # starts of runs that count for the next ones


@dataclass(frozen=True)
class RunLabel:
    """A run as people know it."""

    variant: str  # with its cell, and the experiment's name where there are several
    seed: int
    epochs: int
    metric: str = "accuracy"
    percent: bool = True  # how it is written

    def __str__(self) -> str:
        return f"{self.variant}, seed {self.seed}"


@dataclass(frozen=True)
class SweepPlan:
    """What a sweep is about to do."""

    labels: Mapping[str, RunLabel]  # by run id, in the order of training
    done: frozenset[str] = frozenset()  # in the store from before
    workers: int = 1


def run_labels(*experiments: Experiment) -> dict[str, RunLabel]:
    """The names of experiments' runs; two variants may share a run, and then it has one."""
    labels: dict[str, RunLabel] = {}
    for experiment in experiments:
        metric, percent = experiment.metric, experiment.metrics[experiment.metric].percent
        for seed in experiment.seeds:
            for variant in experiment.variants:
                name = variant_label(variant.name, variant.cell)
                if len(experiments) > 1:
                    name = f"{experiment.name}: {name}"
                (run,) = variant.runs((seed,))
                label = RunLabel(name, seed, variant.setting.train.epochs, metric, percent)
                labels.setdefault(run.id, label)
    return labels


def queue(experiments: Sequence[Experiment]) -> dict[str, Run]:
    """The runs of experiments by id, in the order of training.

    The first seed of all experiments comes before the second of any, so that whenever the time is
    over every one of them has something to show.
    """
    turns = (experiment.runs() for experiment in experiments)
    by_seed = [[list(group) for _, group in groupby(runs, lambda r: r.seed)] for runs in turns]
    rounds = zip_longest(*by_seed, fillvalue=[])
    return {run.id: run for each in rounds for group in each for run in group}


class ProgressListener:
    """Listens, and does nothing. What it hears comes from the launcher's own thread."""

    def begin(self, plan: SweepPlan) -> None: ...
    def started(self, run: str) -> None: ...
    def progressed(self, progress: Progressed) -> None: ...
    def finished(self, result: Result) -> None: ...
    def failed(self, run: str, reason: str) -> None: ...
    def say(self, text: str) -> None: ...
    def end(self) -> None: ...


@dataclass
class RunPace:
    """When a run was begun here, and how far it has come since."""

    began: float
    first: tuple[float, float] | None = None  # time and epochs when it first told of itself
    last: tuple[float, float] | None = None  # … and at the last end of an epoch, else now


class TimeLeft:
    """An estimate from what runs have taken here, by the clock on the wall.

    A run costs its start (a process, the data, the model), and so many seconds an epoch, in which
    evaluation is part of; of small runs that is several times what training alone takes. How many
    runs go on at once is counted: on a GPU a worker has several.
    """

    def __init__(self, plan: SweepPlan, clock: Callable[[], float] = time.monotonic) -> None:
        self.plan, self.clock = plan, clock
        labels = plan.labels
        self.left: dict[str, float] = {  # epochs by run
            run: labels[run].epochs for run in labels if run not in plan.done
        }
        self.paces: dict[str, RunPace] = {}  # of runs that are being trained
        self.speed: dict[str, float] = {}  # seconds an epoch by variant
        self.starts: list[float] = []  # seconds, in the order in which runs began
        self.most = 0  # runs at once

    def started(self, run: str) -> None:
        self.paces[run] = RunPace(self.clock())
        self.most = max(self.most, len(self.paces))

    def progressed(self, progress: Progressed) -> None:
        label, now = self.plan.labels[progress.run], self.clock()
        self.left[progress.run] = max(0.0, label.epochs - progress.epochs)
        pace = self.paces.setdefault(progress.run, RunPace(now))
        if pace.first is None:
            pace.first = now, progress.epochs
            # what came before belongs to it, if it was not resumed in the middle
            self.starts.append(now - pace.began)
            return
        since, epochs = pace.first
        if progress.epochs > epochs and (progress.record is not None or pace.last is None):
            pace.last = now, progress.epochs
            if progress.record is not None or label.variant not in self.speed:
                self.speed[label.variant] = (now - since) / (progress.epochs - epochs)

    def over(self, run: str) -> None:
        """A run has ended, or was left; what a run that says nothing in between took is known."""
        label, pace = self.plan.labels[run], self.paces.pop(run, None)
        if pace is not None and label.variant not in self.speed and label.epochs:
            self.speed[label.variant] = (self.clock() - pace.began) / label.epochs
        self.left.pop(run, None)

    def seconds(self) -> float | None:
        """None: too little has happened to say."""
        if not self.speed:
            return None
        now = self.clock()
        usual = sum(self.speed.values()) / len(self.speed)
        at_once = max(self.most, self.plan.workers)
        # the first ones include the start of a process, which the next runs find running
        starts = self.starts[at_once:][-RECENT:] or self.starts
        start = statistics.median(starts) if starts else 0.0
        costs = []
        for run, epochs in self.left.items():
            pace, speed = self.paces.get(run), self.speed.get(self.plan.labels[run].variant, usual)
            before = start
            if pace is not None:
                before = 0.0 if pace.first else max(0.0, start - (now - pace.began))
            costs.append(before + speed * epochs)
        return max(max(costs, default=0.0), sum(costs) / at_once)  # a run is not split


class ProgressLines(ProgressListener):
    """A line of text for each run that ends: for logs, and machines without rich."""

    def __init__(self, write: Callable[[str], object] | None = None) -> None:
        self.write = write or (lambda text: print(text, file=sys.stderr, flush=True))

    def begin(self, plan: SweepPlan) -> None:
        self.plan, self.time, self.since = plan, TimeLeft(plan), time.monotonic()
        self.ended = len(plan.done)
        before = f", {len(plan.done)} done before" if plan.done else ""
        self.write(f"{len(plan.labels)} runs{before}; {plan.workers} at once")

    def started(self, run: str) -> None:
        self.time.started(run)

    def progressed(self, progress: Progressed) -> None:
        self.time.progressed(progress)

    def finished(self, result: Result) -> None:
        label = self.plan.labels[result.run]
        self._over(result.run, outcome(result, label.metric, label.percent))

    def failed(self, run: str, reason: str) -> None:
        self._over(run, f"failed: {reason}")

    def say(self, text: str) -> None:
        self.write(text)

    def _over(self, run: str, text: str) -> None:
        self.ended += 1
        self.time.over(run)
        seconds = self.time.seconds()
        left = "" if seconds is None else f", about {duration_text(seconds)} left"
        past = duration_text(time.monotonic() - self.since)
        count = f"{self.ended}/{len(self.plan.labels)}"
        self.write(f"[{count}, {past}{left}] {self.plan.labels[run]}: {text}")


def outcome(result: Result, metric: str, percent: bool = True) -> str:
    """A result in a few words; what diverged or collapsed is called so first."""
    if result.status == DIVERGED:
        return f"diverged {result.note}".strip()
    if why := result.collapse():
        return f"collapsed: {why}"
    score = result.score(metric)
    if score is None:
        return result.status
    if not math.isfinite(score):
        return f"diverged: {metric} is {score}, and the loss was finite"
    return f"{metric} {score:.2%}" if percent else f"{metric} {score:.4f}"


def duration_text(seconds: float) -> str:
    """A time as people say it.

    >>> duration_text(8), duration_text(250), duration_text(8000)
    ('8 s', '4 min 10 s', '2 h 13 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
