"""What launcher and workers tell each other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from normkit.lab.experiment import Run
from normkit.lab.results import Epoch, Result

AWAKE = "awake"  # what a local worker says first
STOP = "stop"  # what it is told to make it leave its runs


@dataclass(frozen=True)
class Setup:
    """What a local worker is told once, before its first job."""

    trainer: str
    device: str


@dataclass(frozen=True)
class Job:
    """A run to be trained, from its checkpoint where there is one."""

    run: Run
    checkpoint: Path


@dataclass(frozen=True)
class Told:
    """How far a run has come."""

    run: str  # id
    epochs: float  # trained so far; 2.5: in the middle of the third
    record: Epoch | None = None  # at the end of an epoch


@dataclass(frozen=True)
class Done:
    """A run's result."""

    result: Result


@dataclass(frozen=True)
class Left:
    """A run that was left in the middle because it was asked to; its checkpoint is written."""

    run: str


@dataclass(frozen=True)
class Broke:
    """A run whose training raised an error."""

    run: str
    reason: str
    disk_full: bool = False
    shared: bool = False  # with others at its side, one of which may be the cause


@dataclass(frozen=True)
class Lost:
    """A run whose worker process is gone."""

    run: str
    reason: str
    awake: bool  # whether the process had come up: else the run is not the cause
    shared: bool = False


Message = Told | Done | Left | Broke | Lost
