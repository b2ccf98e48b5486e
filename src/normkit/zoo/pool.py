"""Work in several processes that may crash or hang without taking the rest with them."""

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
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, Generic, TypeVar

import torch

Task = TypeVar("Task")
Result = TypeVar("Result")
TICK = 0.5  # seconds between two looks at the clock
KILLED = -9
GONE = (EOFError, OSError)  # how a pipe says so; the second if the process had not read it all


@dataclass(frozen=True)
class Broken:
    """What stands for the result of a task that gave none."""

    reason: str


def work(
    function: Callable[[Task], Result], tasks: Iterable[Task], jobs: int, limit: float
) -> Iterator[tuple[Task, Result | Broken]]:
    """Each task with its result, as they come. ``limit`` is in seconds for one task."""
    waiting = deque(tasks)
    workers: list[_Worker[Task, Result]] = []
    try:
        while waiting or workers:
            while waiting and len(workers) < jobs:
                workers.append(_Worker(function, waiting.popleft()))
            ready = wait([worker.end for worker in workers], TICK)
            for worker in list(workers):
                if worker.end in ready and not worker.awake and worker.greets():
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


class _Worker(Generic[Task, Result]):
    """A process with one task in hand."""

    def __init__(self, function: Callable[[Task], Result], task: Task) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would copy torch's threads
        self.end, other = context.Pipe()
        self.process: SpawnProcess = context.Process(
            target=_serve, args=(function, other), daemon=True
        )
        self.process.start()
        other.close()  # so that the end of the process is the end of the pipe
        self.awake = False
        self.give(task)

    def give(self, task: Task) -> None:
        self.task, self.since = task, time.monotonic()
        with suppress(OSError):  # a process that is gone is noticed where its result is missing
            self.end.send(task)

    def greets(self) -> bool:
        """Whether the process has come up; its imports, which take seconds, are no task's."""
        try:
            self.end.recv()
        except GONE:
            return False
        self.awake, self.since = True, time.monotonic()
        return True

    def seconds(self) -> float:
        return time.monotonic() - self.since if self.awake else 0.0

    def result(self, limit: float) -> Result | Broken:
        if not self.end.poll():
            self.process.kill()
            self.process.join()
            return Broken(f"took longer than {limit:.0f} s")
        try:
            return self.end.recv()
        except GONE:
            self.process.join()
            code = self.process.exitcode
            hint = " (killed, as when memory runs out)" if code == KILLED else ""
            return Broken(f"the process ended with exit code {code}{hint}")

    def stop(self) -> None:
        self.end.close()
        self.process.kill()
        self.process.join()


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
            os._exit(0)  # without the farewells of imported libraries
        try:
            result = function(task)
        except KeyboardInterrupt:
            os._exit(0)
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            file = os.path.basename(where.filename)
            said = " ".join(str(error).split())
            result = Broken(f"{type(error).__name__}: {said} ({file}:{where.lineno})")
        end.send(result)
