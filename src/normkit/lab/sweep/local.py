"""Worker processes on this machine: how many, on which devices, and what becomes of each."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Protocol

import torch

from normkit.errors import OptionError
from normkit.lab.sweep.messages import READY, STOP, Failed, Job, JobTracker, Message, WorkerSetup
from normkit.lab.sweep.worker import TRAINER

TOGETHER = 4  # runs for a GPU: the most that normkit.lab.train puts side by side
MOST_PRINTED = 64 * 1024  # bytes of what a worker has printed, that are kept of a failure
START = "from normkit.lab.sweep.worker import main; main()"


class Process(Protocol):
    """What is needed of subprocess.Popen."""

    def kill(self) -> None: ...
    def wait(self) -> int: ...


# starts a worker: with its end of the pipe, the launcher's lock to hold, and a log
Start = Callable[[int, int, int], Process]


def spawn(end: int, lock: int, log: int) -> Process:
    """A fresh Python. Its session is its own, so that a terminal's Ctrl-C does not reach it."""
    # the same packages as here; each worker has one thread, also in libraries
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    more = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    return subprocess.Popen(
        [sys.executable, "-P", "-c", START, str(end)],
        env={**os.environ, **more},
        pass_fds=(end, lock),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )


@dataclass(frozen=True)
class WorkerSlot:
    """The device of one worker, and how many runs of one setting it is given at once.

    How many of them it trains side by side, normkit.lab.train decides.
    """

    device: str = "cpu"
    together: int = 1


class LocalEngine:
    """An engine of worker processes, which are started when they are needed."""

    def __init__(
        self, slots: Sequence[WorkerSlot], lock: int, trainer: str = TRAINER, start: Start = spawn
    ) -> None:
        self._slots, self._lock, self._trainer, self._start = slots, lock, trainer, start
        self._workers: dict[int, _Worker] = {}  # by the number of their slot

    def size(self) -> int:
        return len(self._slots)

    def room(self) -> int:
        idle = self._idle()
        return 0 if idle is None else self._slots[idle].together

    def start(self, jobs: Sequence[Job]) -> None:
        number = self._idle()
        assert number is not None, "start() without room()"
        if number not in self._workers:
            setup = WorkerSetup(self._trainer, self._slots[number].device)
            self._workers[number] = _Worker(setup, self._lock, self._start)
        self._workers[number].give(jobs)

    def poll(self, seconds: float) -> list[Message]:
        pipes = {worker.pipe: number for number, worker in self._workers.items()}
        messages: list[Message] = []
        for pipe in wait(list(pipes), seconds):
            number = pipes[pipe]  # type: ignore[index]
            worker = self._workers[number]
            messages += worker.read()
            if worker.over:
                worker.close()
                del self._workers[number]
        return messages

    def stop(self) -> None:
        for worker in self._workers.values():
            worker.send(STOP)

    def close(self) -> None:
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()

    def _idle(self) -> int | None:
        """A slot whose worker has nothing to do; one with a worker if possible."""
        free = [
            number
            for number in range(len(self._slots))
            if number not in self._workers or not self._workers[number].jobs
        ]
        return min(free, key=lambda number: number not in self._workers, default=None)


class _Worker(JobTracker):
    """A process and the jobs that it has."""

    def __init__(self, setup: WorkerSetup, lock: int, start: Start) -> None:
        super().__init__()
        ours, theirs = socket.socketpair()
        self.log = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
        with theirs:
            self.process = start(theirs.fileno(), lock, self.log.fileno())
        self.pipe = Connection(ours.detach())
        self.send(setup)

    def give(self, jobs: Sequence[Job]) -> None:
        self.assign(jobs)
        self.log.seek(0)  # the process writes where this stands
        self.log.truncate(0)
        self.send(list(jobs))

    def send(self, message: object) -> None:
        with suppress(OSError):  # a process that is gone is noticed in read()
            self.pipe.send(message)

    def read(self) -> list[Message]:
        """What it has sent; if it is gone, what became of its jobs."""
        messages: list[Message] = []
        try:
            while self.pipe.poll():
                message = self.pipe.recv()
                if message == READY:
                    self.ready = True
                else:
                    if isinstance(message, Failed):
                        message = replace(message, log=join_logs(message.log, self._printed()))
                    messages.append(message)
                    self.note(message)
        except (EOFError, OSError):  # the second if the process had not read it all
            messages += self.lost(self._death(), self._printed())
        return messages

    def close(self) -> None:
        self.pipe.close()
        self.process.kill()
        self.process.wait()
        self.log.close()

    def _printed(self) -> str:
        """What the process has printed since it got its jobs, or the end of it."""
        size = os.fstat(self.log.fileno()).st_size
        begin = max(0, size - MOST_PRINTED)
        # pread: the process writes where the file's position stands
        text = os.pread(self.log.fileno(), size - begin, begin).decode(errors="replace")
        return text.lstrip("\0")

    def _death(self) -> str:
        """How it ended, and the line of its log that says most."""
        self.process.kill()  # it may have closed the pipe only
        code = self.process.wait()
        status = f"exit code {code}"
        if code < 0:
            with suppress(ValueError):
                status = signal.Signals(-code).name
        hint = ", as when memory runs out" if code == -signal.SIGKILL else ""
        lines = [line.strip() for line in self._printed().splitlines()]
        # of a crash the first line says most, of a Python error the last
        fatal = [line for line in lines if line.startswith("Fatal Python error")]
        words = next((line for line in (*fatal, *reversed(lines)) if line), "")[:500]
        return f"the worker process ended ({status}{hint})" + (f": {words}" if words else "")


def join_logs(raised: str, printed: str) -> str:
    """The log of a failed run: its traceback, and what its process printed before."""
    if not printed.strip():
        return raised
    return f"{raised.rstrip()}\n\nPrinted by its process:\n{printed}" if raised else printed


def worker_slots(
    workers: int | None = None,
    device: str | None = None,
    gpus: int = 1,
    together: int | None = None,
) -> list[WorkerSlot]:
    """One worker for each core of a CPU or for each GPU, unless told otherwise.

    Where a run takes several ``gpus`` there is one for so many: it is given the first of them.

    >>> worker_slots(workers=2, device="cpu")
    [WorkerSlot(device='cpu', together=1), WorkerSlot(device='cpu', together=1)]
    """
    for name, value in (("workers", workers), ("together", together)):
        if value is not None and value < 1:
            raise OptionError(f"{name} got {value}, expected 1 or more.")
    devices = _devices(device)
    if gpus > 1 and devices[0].startswith("cuda"):
        if len(devices) < gpus and not (device and torch.device(device).index is not None):
            raise OptionError(
                f"train.gpus = {gpus}, and torch sees {len(devices)} CUDA devices here. Try "
                f"train.gpus = {len(devices)}, or --device cpu."
            )
        devices = devices[: len(devices) // gpus * gpus : gpus] or devices
    here = max(1, cores() // gpus) if devices == ["cpu"] else len(devices)
    count = workers or here
    chosen = [devices[i % len(devices)] for i in range(count)]
    most = TOGETHER if together is None else together
    return [WorkerSlot(each, most if each.startswith("cuda") else 1) for each in chosen]


def _devices(device: str | None) -> list[str]:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    every = [f"cuda:{i}" for i in range(count)]
    if device is None:
        return every or ["cpu"]
    try:
        wanted = torch.device(device)
    except RuntimeError as error:
        raise OptionError(f"device got {device!r}. Try cpu, cuda or cuda:0.") from error
    if wanted.type != "cuda":
        try:
            torch.zeros(1, device=wanted).item()
        except (RuntimeError, NotImplementedError) as error:  # not of this machine, or "meta"
            raise OptionError(
                f"device got {device!r}, which cannot train here. Try cpu."
            ) from error
        return [device]
    if not every or (wanted.index or 0) >= count:
        raise OptionError(
            f"device got {device!r}, and torch sees {count} CUDA devices here. Try cpu."
        )
    return every if wanted.index is None else [device]


def cores() -> int:
    """CPU cores that this process may use: of its affinity, and of its container's share."""
    try:
        count = len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        count = os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(count, int(quota) // int(period)))
    except (OSError, ValueError):  # no such file, or "max"
        return count
