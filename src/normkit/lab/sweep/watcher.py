"""Who is told about a sweep while it goes on: nobody, a terminal, or lines of text."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from normkit.lab.experiment import Experiment
from normkit.lab.results import DIVERGED, Result
from normkit.lab.sweep.messages import Told


@dataclass(frozen=True)
class Entry:
    """A run as people know it."""

    variant: str  # with its cell
    seed: int
    epochs: int

    def __str__(self) -> str:
        return f"{self.variant}, seed {self.seed}"


@dataclass(frozen=True)
class Plan:
    """What a sweep is about to do."""

    entries: Mapping[str, Entry]  # by run id, in the order of training
    done: frozenset[str] = frozenset()  # known from before
    workers: int = 1
    metric: str = "accuracy"


def entries(experiment: Experiment) -> dict[str, Entry]:
    """The names of an experiment's runs; two variants may share a run, and then it has one."""
    made: dict[str, Entry] = {}
    for seed in experiment.seeds:
        for variant in experiment.variants:
            cell = ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in variant.cell)
            name = f"{variant.name} ({cell})" if cell else variant.name
            (run,) = variant.runs((seed,))
            made.setdefault(run.id, Entry(name, seed, variant.setting.train.epochs))
    return made


class Watcher:
    """Listens, and does nothing. What it is told comes from the launcher's own thread."""

    def begin(self, plan: Plan) -> None: ...
    def started(self, run: str) -> None: ...
    def told(self, told: Told) -> None: ...
    def finished(self, result: Result) -> None: ...
    def failed(self, run: str, reason: str) -> None: ...
    def say(self, text: str) -> None: ...
    def end(self) -> None: ...


@dataclass
class TimeLeft:
    """An estimate from the seconds that an epoch of each variant has taken so far."""

    plan: Plan
    left: dict[str, float] = field(default_factory=dict)  # epochs by run
    speed: dict[str, float] = field(default_factory=dict)  # seconds an epoch by variant

    def __post_init__(self) -> None:
        entries = self.plan.entries
        self.left = {run: entries[run].epochs for run in entries if run not in self.plan.done}

    def told(self, told: Told) -> None:
        entry = self.plan.entries[told.run]
        self.left[told.run] = max(0.0, entry.epochs - told.epochs)
        if told.record is not None and told.record.epoch and told.record.seconds:
            self.speed[entry.variant] = told.record.seconds / told.record.epoch

    def over(self, run: str) -> None:
        self.left.pop(run, None)

    def seconds(self) -> float | None:
        """None: nothing is known yet."""
        if not self.speed:
            return None
        usual = sum(self.speed.values()) / len(self.speed)
        cost = {run: self.speed.get(self.plan.entries[run].variant, usual) for run in self.left}
        longest = max((cost[run] * left for run, left in self.left.items()), default=0.0)
        total = sum(cost[run] * left for run, left in self.left.items())
        return max(longest, total / self.plan.workers)  # a run is not split


class Lines(Watcher):
    """A line of text for each run that ends: for logs, and machines without rich."""

    def __init__(self, write: Callable[[str], object] | None = None) -> None:
        self.write = write or (lambda text: print(text, file=sys.stderr, flush=True))

    def begin(self, plan: Plan) -> None:
        self.plan, self.time, self.since = plan, TimeLeft(plan), time.monotonic()
        self.ended = len(plan.done)
        before = f", {len(plan.done)} known from before" if plan.done else ""
        self.write(f"{len(plan.entries)} runs{before}; {plan.workers} at once")

    def told(self, told: Told) -> None:
        self.time.told(told)

    def finished(self, result: Result) -> None:
        self._over(result.run, outcome(result, self.plan.metric))

    def failed(self, run: str, reason: str) -> None:
        self._over(run, f"failed: {reason}")

    def say(self, text: str) -> None:
        self.write(text)

    def _over(self, run: str, said: str) -> None:
        self.ended += 1
        self.time.over(run)
        seconds = self.time.seconds()
        left = "" if seconds is None else f", about {spoken(seconds)} left"
        past = spoken(time.monotonic() - self.since)
        count = f"{self.ended}/{len(self.plan.entries)}"
        self.write(f"[{count}, {past}{left}] {self.plan.entries[run]}: {said}")


def outcome(result: Result, metric: str) -> str:
    """A result in three words."""
    if result.status == DIVERGED:
        return f"diverged {result.note}".strip()
    score = result.score(metric)
    if score is None:
        return result.status
    return f"{metric} {score:.4f}" if metric == "loss" else f"{metric} {score:.2%}"


def spoken(seconds: float) -> str:
    """A time as people say it.

    >>> spoken(8), spoken(250), spoken(8000)
    ('8 s', '4 min 10 s', '2 h 13 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def summary(results: Iterable[Result]) -> str:
    """How many of each kind."""
    kinds = [result.status for result in results]
    bad = kinds.count(DIVERGED)
    return f"{len(kinds)} done" + (f", {bad} of them diverged" if bad else "")
