"""Worker processes on this machine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Protocol

from normkit.lab.sweep.messages import AWAKE, STOP, Broke, Done, Job, Left, Lost, Message, Setup
from normkit.lab.sweep.places import Place
from normkit.lab.sweep.serving import TRAINER

GONE = (EOFError, OSError)  # how a pipe says so; the second if the process had not read it all


class Process(Protocol):
    """What is needed of subprocess.Popen."""

    def kill(self) -> None: ...
    def wait(self) -> int: ...


class Start(Protocol):
    """Starts a worker: with its end of the pipe, the launcher's lock to hold, and a log."""

    def __call__(self, end: int, lock: int, log: int) -> Process: ...


def spawn(end: int, lock: int, log: int) -> Process:
    """A fresh Python. Its session is its own, so that a terminal's Ctrl-C does not reach it."""
    # the same packages as here; each worker has one thread, also in libraries
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    more = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "normkit.lab.sweep.worker", str(end)],
        env={**os.environ, **more},
        pass_fds=(end, lock),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )


class Local:
    """An engine of worker processes, which are started when they are needed."""

    def __init__(
        self, places: Sequence[Place], lock: int, trainer: str = TRAINER, start: Start = spawn
    ) -> None:
        self._places, self._lock, self._trainer, self._start = places, lock, trainer, start
        self._workers: dict[int, _Worker] = {}  # by the number of their place

    def size(self) -> int:
        return len(self._places)

    def room(self) -> int:
        idle = self._idle()
        return 0 if idle is None else self._places[idle].together

    def start(self, jobs: Sequence[Job]) -> None:
        number = self._idle()
        assert number is not None, "start() without room()"
        if number not in self._workers:
            setup = Setup(self._trainer, self._places[number].device)
            self._workers[number] = _Worker(setup, self._lock, self._start)
        self._workers[number].give(jobs)

    def poll(self, seconds: float) -> list[Message]:
        ends = {worker.end: number for number, worker in self._workers.items()}
        told: list[Message] = []
        for end in wait(list(ends), seconds):
            number = ends[end]  # type: ignore[index]
            worker = self._workers[number]
            told += worker.read()
            if worker.over:
                worker.close()
                del self._workers[number]
        return told

    def stop(self) -> None:
        for worker in self._workers.values():
            worker.send(STOP)

    def close(self) -> None:
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()

    def _idle(self) -> int | None:
        """A place whose worker has nothing to do; one with a worker if possible."""
        free = [
            number
            for number in range(len(self._places))
            if number not in self._workers or not self._workers[number].jobs
        ]
        return min(free, key=lambda number: number not in self._workers, default=None)


class _Worker:
    """A process and the jobs that it has."""

    def __init__(self, setup: Setup, lock: int, start: Start) -> None:
        ours, theirs = socket.socketpair()
        self.log = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
        with theirs:
            self.process = start(theirs.fileno(), lock, self.log.fileno())
        self.end = Connection(ours.detach())
        self.jobs: dict[str, Job] = {}
        self.shared = self.awake = self.over = False
        self.send(setup)

    def give(self, jobs: Sequence[Job]) -> None:
        self.jobs = {job.run.id: job for job in jobs}
        self.shared = len(jobs) > 1
        self.log.truncate(0)
        self.send(list(jobs))

    def send(self, message: object) -> None:
        with suppress(OSError):  # a process that is gone is noticed in read()
            self.end.send(message)

    def read(self) -> list[Message]:
        """What it has sent; if it is gone, what became of its jobs."""
        told: list[Message] = []
        try:
            while self.end.poll():
                message = self.end.recv()
                if message == AWAKE:
                    self.awake = True
                    continue
                told.append(message)
                if isinstance(message, Done):
                    self.jobs.pop(message.result.run, None)
                elif isinstance(message, Left | Broke):
                    self.jobs.pop(message.run, None)
                    # after an error, another process takes the next job
                    self.over = isinstance(message, Broke) and not self.jobs
        except GONE:
            self.over = True
            why = self._why()
            told += [Lost(run, why, self.awake, self.shared) for run in self.jobs]
        return told

    def close(self) -> None:
        self.end.close()
        self.process.kill()
        self.process.wait()
        self.log.close()

    def _why(self) -> str:
        self.process.kill()  # it may have closed the pipe only
        code = self.process.wait()
        said = f"exit code {code}"
        if code < 0:
            with suppress(ValueError):
                said = signal.Signals(-code).name
        hint = ", as when memory runs out" if code == -signal.SIGKILL else ""
        self.log.seek(0)
        lines = [line.strip() for line in self.log.read().decode(errors="replace").splitlines()]
        # of a crash the first line says most, of a Python error the last
        fatal = [line for line in lines if line.startswith("Fatal Python error")]
        words = next((line for line in (*fatal, *reversed(lines)) if line), "")[:500]
        return f"the worker process ended ({said}{hint})" + (f": {words}" if words else "")
