"""All models, tried in processes that may crash or hang without taking the rest with them."""

from __future__ import annotations

import logging
import multiprocessing
import os
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Generic, TypeVar
from zlib import crc32

import torch

from tools.zoo import models
from tools.zoo.models import ZooModel
from tools.zoo.results import Records, Report, Task, source_digest, versions
from tools.zoo.trial import attempt

SAMPLE = 60
DESCRIBE_SECONDS = 60.0  # for one model to be built on the meta device
TRY_SECONDS = 600.0  # for one model to be tried

Tick = Callable[[str], None]


Given = TypeVar("Given")
Result = TypeVar("Result")
POLL_SECONDS = 0.5
KILLED = -9
GONE = (EOFError, OSError)  # how a pipe says so; the second if the process had not read it all


@dataclass(frozen=True)
class Request:
    """What a sweep is to do."""

    targets: tuple[str, ...]
    sample: int | None = None
    """So many models of timm are run, and none tried on the meta device; None: all, and 60 run."""
    only: tuple[str, ...] = ()
    """Patterns that a reference must match one of; empty: all models."""
    in_turn: bool = False
    """Each model gets one of the targets, not all of them."""
    jobs: int = 2


class Sweep:
    """A request, and what is known about it already."""

    def __init__(self, request: Request, records: Records) -> None:
        self.request, self.records = request, records
        libraries = " ".join(f"{name} {version}" for name, version in versions().items())
        self._about_models = libraries
        targets = f"{','.join(request.targets)}{' in turn' * request.in_turn}"
        self._about_trials = f"{libraries} normkit {source_digest()} {targets}"

    def listing(self) -> list[str]:
        """The references of timm, of which those with batch norm will be tried."""
        wanted = [reference for reference in models.timm_references() if self._wanted(reference)]
        return wanted if self.request.sample is None else models.few_of_each_family(wanted)

    def describe(self, tick: Tick) -> tuple[list[ZooModel], dict[str, Report]]:
        """Every model of timm that has batch norms; and those that could not be built."""
        known = self.records.read(self._about_models)
        listed = self.listing()
        for reference in listed:
            if reference in known:
                tick(reference)
        missing = [reference for reference in listed if reference not in known]
        failed: dict[str, Report] = {}
        described = run_in_processes(models.describe, missing, self.request.jobs, DESCRIBE_SECONDS)
        for reference, model in described:
            tick(reference)
            if isinstance(model, NoResult):
                failed[f"meta {reference}"] = Report(failures=[model.reason])
            else:
                facts = asdict(model)
                self.records.add(self._about_models, facts.pop("reference"), facts)
                known[reference] = facts
        every = [ZooModel(name, **known[name]) for name in listed if name in known]
        return [model for model in every if model.batch_norms], failed

    def tasks(self, described: list[ZooModel]) -> list[Task]:
        """What has to be tried, the smallest model first."""
        request = self.request
        sample = SAMPLE if request.sample is None else request.sample
        few = set(models.few_of_each_family(self.listing()))
        candidates = [model for model in described if model.reference in few]
        chosen = {model.reference for model in models.choose(candidates, sample)}
        by_size = sorted(described, key=lambda m: (m.parameters, m.reference))
        tried = [] if request.sample is not None else [m.reference for m in by_size]
        run = [m.reference for m in by_size if m.reference in chosen]
        run += [r for r in models.torchvision_references() if self._wanted(r)]
        return [
            *(Task(reference, self._targets(reference), runs=True) for reference in run),
            *(Task(reference, self._targets(reference)) for reference in tried),
        ]

    def _targets(self, reference: str) -> tuple[str, ...]:
        every = self.request.targets
        # by the name, so that a new model in the list does not change what the others get
        return (every[crc32(reference.encode()) % len(every)],) if self.request.in_turn else every

    def done(self, tasks: list[Task]) -> dict[str, Report]:
        """Results of an earlier sweep that hold still. Failures do not: they are tried again."""
        known = self.records.read(self._about_trials)
        kept = {t.name: Report.of(known[t.name]) for t in tasks if t.name in known}
        return {name: report for name, report in kept.items() if report.passed}

    def attempt(self, tasks: list[Task]) -> Iterator[tuple[Task, Report]]:
        """Try models, and write down what comes of each."""
        for task, result in run_in_processes(attempt, tasks, self.request.jobs, TRY_SECONDS):
            report = Report(failures=[result.reason]) if isinstance(result, NoResult) else result
            self.records.add(self._about_trials, task.name, report.to_dict())
            yield task, report

    def _wanted(self, reference: str) -> bool:
        only = self.request.only
        return not only or any(fnmatchcase(reference, pattern) for pattern in only)


@dataclass(frozen=True)
class NoResult:
    """What stands for the result of a task that gave none."""

    reason: str


def run_in_processes(
    function: Callable[[Given], Result], tasks: Iterable[Given], jobs: int, limit: float
) -> Iterator[tuple[Given, Result | NoResult]]:
    """Each task with its result, as they come. ``limit`` is in seconds for one task."""
    waiting = deque(tasks)
    workers: list[_Worker[Given, Result]] = []
    try:
        while waiting or workers:
            while waiting and len(workers) < jobs:
                workers.append(_Worker(function, waiting.popleft()))
            ready = wait([worker.end for worker in workers], POLL_SECONDS)
            for worker in list(workers):
                if worker.end in ready and not worker.awake and worker.ready():
                    continue
                if worker.end not in ready and worker.seconds() < limit:
                    continue
                yield worker.task, worker.result(limit)
                if waiting and worker.process.is_alive():
                    worker.give(waiting.popleft())
                else:
                    worker.stop()
                    workers.remove(worker)
    finally:
        for worker in workers:
            worker.stop()


class _Worker(Generic[Given, Result]):
    """A process with one task in hand."""

    def __init__(self, function: Callable[[Given], Result], task: Given) -> None:
        context = _context()
        self.end, other = context.Pipe()
        self.process: BaseProcess = context.Process(
            target=_serve, args=(function, other), daemon=True
        )
        self.process.start()
        other.close()  # so that the end of the process is the end of the pipe
        self.awake = False
        self.give(task)

    def give(self, task: Given) -> None:
        self.task, self.since = task, time.monotonic()
        with suppress(OSError):  # a process that is gone is noticed where its result is missing
            self.end.send(task)

    def ready(self) -> bool:
        """Whether the process has come up; its imports, which take seconds, are no task's."""
        try:
            self.end.recv()
        except GONE:
            return False
        self.awake, self.since = True, time.monotonic()
        return True

    def seconds(self) -> float:
        return time.monotonic() - self.since if self.awake else 0.0

    def result(self, limit: float) -> Result | NoResult:
        if not self.end.poll():
            self.process.kill()
            self.process.join()
            return NoResult(f"took longer than {limit:.0f} s")
        try:
            return self.end.recv()
        except GONE:
            self.process.join()
            code = self.process.exitcode
            hint = " (killed, as when memory runs out)" if code == KILLED else ""
            return NoResult(f"the process ended with exit code {code}{hint}")

    def stop(self) -> None:
        self.end.close()
        self.process.kill()
        self.process.join()


def _context() -> Any:
    """Processes that come from one which has imported the libraries and done nothing else: that
    takes six seconds, and a fork of this process would copy torch's threads."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["timm", "torchvision"])
    return context


def _serve(function: Callable[[Any], Any], end: Connection) -> None:
    """The life of a worker process: a task in, a result out, until the pipe closes."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # they would be printed into the progress bar
    logging.disable()
    end.send("awake")
    while True:
        try:
            task = end.recv()
        except (EOFError, OSError, KeyboardInterrupt):
            os._exit(0)  # without the exit handlers of imported libraries
        try:
            result: Any = function(task)
        except KeyboardInterrupt:
            os._exit(0)
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            file = os.path.basename(where.filename)
            text = " ".join(str(error).split())
            result = NoResult(f"{type(error).__name__}: {text} ({file}:{where.lineno})")
        end.send(result)
