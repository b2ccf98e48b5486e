"""What launcher and workers tell each other, and what the launcher needs of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from normkit.errors import NormkitError
from normkit.lab.experiment import Run
from normkit.lab.results import Epoch, Result

READY = "ready"  # what a local worker says first
STOP = "stop"  # what it is told to make it leave its runs


class SweepError(NormkitError):
    """A sweep that cannot go on. What is done is kept."""


@dataclass(frozen=True)
class WorkerSetup:
    """What a local worker is told once, before its first job."""

    trainer: str
    device: str


@dataclass(frozen=True)
class Job:
    """A run to be trained, from its checkpoint where there is one."""

    run: Run
    checkpoint: Path


@dataclass(frozen=True)
class Progressed:
    """How far a run has come."""

    run: str  # id
    epochs: float  # trained so far; 2.5: in the middle of the third
    record: Epoch | None = None  # at the end of an epoch


@dataclass(frozen=True)
class Finished:
    """A run's result."""

    result: Result


@dataclass(frozen=True)
class Stopped:
    """A run that was left in the middle because it was asked to; its checkpoint is written."""

    run: str


@dataclass(frozen=True)
class Failed:
    """A run whose training raised an error."""

    run: str
    reason: str
    disk_full: bool = False
    shared: bool = False  # with others at its side, one of which may be the cause
    log: str = ""  # the traceback, and what the process printed


@dataclass(frozen=True)
class WorkerLost:
    """A run whose worker process is gone."""

    run: str
    reason: str
    ready: bool  # whether the process had started: else the run is not the cause
    shared: bool = False
    log: str = ""  # what the process printed


Message = Progressed | Finished | Stopped | Failed | WorkerLost


class Engine(Protocol):
    """Trains jobs somewhere else, in processes of this machine or a cluster, and tells of them."""

    def size(self) -> int:
        """How many workers there can be at once."""

    def room(self) -> int:
        """How many jobs one worker could begin with now; 0: all are busy."""

    def start(self, jobs: Sequence[Job]) -> None:
        """Let one worker train these side by side; not more of them than there is room for."""

    def poll(self, seconds: float) -> list[Message]:
        """What has been told; waits so long for the first message."""

    def stop(self) -> None:
        """Ask all workers to write checkpoints and leave their runs."""

    def close(self) -> None:
        """End all workers now, and return when they are gone."""


class JobTracker:
    """The jobs that a worker has, of any engine: what its messages say about them."""

    def __init__(self) -> None:
        self.jobs: dict[str, Job] = {}
        self.shared = self.ready = self.over = False

    def assign(self, jobs: Sequence[Job]) -> None:
        self.jobs = {job.run.id: job for job in jobs}
        self.shared = len(jobs) > 1

    def note(self, message: Message) -> None:
        if isinstance(message, Finished):
            self.jobs.pop(message.result.run, None)
        elif isinstance(message, Stopped | Failed):
            self.jobs.pop(message.run, None)
            # after an error, another process takes the next job
            self.over = isinstance(message, Failed) and not self.jobs

    def lost(self, reason: str, log: str = "") -> list[Message]:
        """The worker is gone, and with it the jobs that it has not finished."""
        self.over = True
        return [WorkerLost(run, reason, self.ready, self.shared, log) for run in self.jobs]
