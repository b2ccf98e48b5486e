"""Who is told about a sweep while it goes on: nobody, a terminal, or lines of text."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from normkit.lab.experiment import Experiment
from normkit.lab.results import DIVERGED, Result
from normkit.lab.sweep.messages import Progressed


@dataclass(frozen=True)
class RunLabel:
    """A run as people know it."""

    variant: str  # with its cell
    seed: int
    epochs: int

    def __str__(self) -> str:
        return f"{self.variant}, seed {self.seed}"


@dataclass(frozen=True)
class SweepPlan:
    """What a sweep is about to do."""

    labels: Mapping[str, RunLabel]  # by run id, in the order of training
    done: frozenset[str] = frozenset()  # in the store from before
    workers: int = 1
    metric: str = "accuracy"


def run_labels(experiment: Experiment) -> dict[str, RunLabel]:
    """The names of an experiment's runs; two variants may share a run, and then it has one."""
    labels: dict[str, RunLabel] = {}
    for seed in experiment.seeds:
        for variant in experiment.variants:
            cell = ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in variant.cell)
            name = f"{variant.name} ({cell})" if cell else variant.name
            (run,) = variant.runs((seed,))
            labels.setdefault(run.id, RunLabel(name, seed, variant.setting.train.epochs))
    return labels


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
class TimeLeft:
    """An estimate from the seconds that an epoch of each variant has taken so far."""

    plan: SweepPlan
    left: dict[str, float] = field(default_factory=dict)  # epochs by run
    speed: dict[str, float] = field(default_factory=dict)  # seconds an epoch by variant

    def __post_init__(self) -> None:
        labels = self.plan.labels
        self.left = {run: labels[run].epochs for run in labels if run not in self.plan.done}

    def progressed(self, progress: Progressed) -> None:
        label = self.plan.labels[progress.run]
        self.left[progress.run] = max(0.0, label.epochs - progress.epochs)
        if progress.record is not None and progress.record.epoch and progress.record.seconds:
            self.speed[label.variant] = progress.record.seconds / progress.record.epoch

    def over(self, run: str) -> None:
        self.left.pop(run, None)

    def seconds(self) -> float | None:
        """None: no epoch has ended yet."""
        if not self.speed:
            return None
        usual = sum(self.speed.values()) / len(self.speed)
        cost = {run: self.speed.get(self.plan.labels[run].variant, usual) for run in self.left}
        longest = max((cost[run] * left for run, left in self.left.items()), default=0.0)
        total = sum(cost[run] * left for run, left in self.left.items())
        return max(longest, total / self.plan.workers)  # a run is not split


class ProgressLines(ProgressListener):
    """A line of text for each run that ends: for logs, and machines without rich."""

    def __init__(self, write: Callable[[str], object] | None = None) -> None:
        self.write = write or (lambda text: print(text, file=sys.stderr, flush=True))

    def begin(self, plan: SweepPlan) -> None:
        self.plan, self.time, self.since = plan, TimeLeft(plan), time.monotonic()
        self.ended = len(plan.done)
        before = f", {len(plan.done)} done before" if plan.done else ""
        self.write(f"{len(plan.labels)} runs{before}; {plan.workers} at once")

    def progressed(self, progress: Progressed) -> None:
        self.time.progressed(progress)

    def finished(self, result: Result) -> None:
        self._over(result.run, outcome(result, self.plan.metric))

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


def outcome(result: Result, metric: str) -> str:
    """A result in three words."""
    if result.status == DIVERGED:
        return f"diverged {result.note}".strip()
    score = result.score(metric)
    if score is None:
        return result.status
    return f"{metric} {score:.4f}" if metric == "loss" else f"{metric} {score:.2%}"


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
