"""What a worker does with its jobs, and the process of one on this machine."""

from __future__ import annotations

import errno
import importlib
import io
import logging
import os
import queue
import signal
import sys
import threading
import traceback
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from normkit.errors import NormkitError
from normkit.lab.experiment import Setting
from normkit.lab.sweep.messages import (
    READY,
    STOP,
    Failed,
    Finished,
    Job,
    Message,
    Progressed,
    Stopped,
    WorkerSetup,
)
from normkit.lab.tasks import load_sets, sets_key

if TYPE_CHECKING:
    from normkit.lab.results import Result

TRAINER = "normkit.lab.train"
DATA_SETS = 2  # data sets that a worker keeps in memory
DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

Send = Callable[[Message], None]


class JobRunner:
    """Trains jobs with a module that has the functions of normkit.lab.train."""

    def __init__(self, trainer: str, device: str, send: Send, stop: Callable[[], bool]) -> None:
        self.trainer: ModuleType = importlib.import_module(trainer)
        self.device, self.send, self.stop = device, send, stop
        self.sets: OrderedDict[str, Any] = OrderedDict()
        self.done: set[str] = set()  # of the runs that are being trained

    def run(self, jobs: Sequence[Job]) -> bool:
        """Train jobs of one setting; False if an error came up, whatever it left behind."""
        waiting = list(jobs)
        while waiting:
            if self.stop():
                for job in waiting:
                    self.send(Stopped(job.run.id))
                return True
            group = waiting[:1]
            self.done.clear()
            try:
                group = waiting[: self._together(waiting)]
                self._train(group)
            except Exception as error:
                full = disk_full_cause(error)
                log = "".join(traceback.format_exception(error))
                for job in group:
                    if job.run.id not in self.done:
                        reason, shared = describe_error(full or error), len(group) > 1
                        self.send(Failed(job.run.id, reason, full is not None, shared, log))
                for job in waiting[len(group) :]:
                    self.send(Stopped(job.run.id))
                return False
            del waiting[: len(group)]
        return True

    def _together(self, jobs: Sequence[Job]) -> int:
        """How many of these runs to train side by side."""
        if len(jobs) == 1:
            return 1
        setting = jobs[0].run.setting
        shape = self._load(setting).shape
        return max(1, self.trainer.side_by_side(setting, shape, self.device))

    def _train(self, jobs: Sequence[Job]) -> None:
        given = {
            "device": self.device,
            "sets": self._load(jobs[0].run.setting),
            "tell": lambda each: self.send(Progressed(each.run, each.epochs, each.record)),
            "stop": self.stop,
        }
        if len(jobs) == 1:
            result = self.trainer.train(jobs[0].run, checkpoint=jobs[0].checkpoint, **given)
            if result is not None:
                self._done(result)
        else:
            checkpoints = [job.checkpoint for job in jobs]
            self.trainer.train_together(
                [job.run for job in jobs], checkpoints=checkpoints, done=self._done, **given
            )
        for job in jobs:
            if job.run.id not in self.done:
                self.send(Stopped(job.run.id))

    def _done(self, result: Result) -> None:
        """Told at once: what happens to the runs beside it can no longer lose it."""
        self.done.add(result.run)
        self.send(Finished(result))

    def _load(self, setting: Setting) -> Any:
        """The sets of a run, which the next runs will need too."""
        key = sets_key(setting)
        if key not in self.sets:
            while len(self.sets) >= DATA_SETS:
                self.sets.popitem(last=False)
            load = getattr(self.trainer, "load", load_sets)
            self.sets[key] = load(setting, self.device)
        self.sets.move_to_end(key)
        return self.sets[key]


def describe_error(error: BaseException) -> str:
    """An error in one line, with its place unless it was raised to be read."""
    message = " ".join(str(error).split())[:1000]
    if isinstance(error, NormkitError):
        return message
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {message}{where}"


def disk_full_cause(error: BaseException | None) -> BaseException | None:
    """The error which says that a disk is full: this one, or one that it came from."""
    chain: list[BaseException] = []
    while error is not None:
        chain.append(error)
        error = error.__cause__ or error.__context__
    for each in chain:
        if isinstance(each, OSError) and each.errno in DISK_FULL:
            return each
    # torch's own writer knows no error numbers
    return next((each for each in chain if "PytorchStreamWriter" in str(each)), None)


def main() -> None:
    """A worker process: its argument is the number of its end of the pipe to the launcher."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's: it asks us to stop
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # what is printed is in the log of a failure
    work(Connection(int(sys.argv[1])))


def work(pipe: Connection) -> None:
    """Jobs in, messages out, until the launcher is gone. It never returns."""
    jobs: queue.SimpleQueue[list[Job]] = queue.SimpleQueue()
    stopping = threading.Event()

    def receive() -> Any:
        try:
            return pipe.recv()
        except (EOFError, OSError):  # the launcher is gone
            os._exit(1)

    def send(message: Message | str) -> None:
        try:
            pipe.send(message)
        except OSError:
            os._exit(1)

    def listen() -> None:
        while True:
            message = receive()
            if message == STOP:
                stopping.set()
            else:
                jobs.put(message)

    setup: WorkerSetup = receive()
    # a thread of its own, so that an end of the launcher ends a worker in the middle of a step
    threading.Thread(target=listen, daemon=True).start()
    warnings.simplefilter("ignore")  # nobody reads them, and they would fill the log
    logging.disable()
    torch.set_num_threads(1)  # the same sums in the same order, however many workers there are
    runner = JobRunner(setup.trainer, setup.device, send, stopping.is_set)
    send(READY)
    while runner.run(jobs.get()):
        pass
    # after an error memory may be gone and a GPU unusable: the next job gets a new process.
    # Without the farewells of imported libraries, but not before the launcher has read all
    threading.Event().wait()
