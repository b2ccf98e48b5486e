"""Files from which a run goes on after an interruption, with the numbers it would have had."""

from __future__ import annotations

import os
import time
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from normkit.core.atomic_write import atomic_write
from normkit.errors import NormkitError
from normkit.lab.experiment import PROTOCOL
from normkit.lab.results import Epoch
from normkit.lab.train.device import Clock, device_name

if TYPE_CHECKING:
    from normkit.lab.train.training import Training

EVERY = 30.0  # seconds between two files
SHARE = 0.02  # of the time at most is spent on writing them


class StaleCheckpoint(NormkitError):
    """A checkpoint that cannot be used: damaged, or of another run, device or version of torch."""


class Checkpointer:
    """Writes a training to a file now and then, and reads it again. Without a path, neither."""

    def __init__(self, path: Path | None, every: float = EVERY) -> None:
        self.path, self.every = path, every
        self.wait = every
        self.last = time.monotonic()

    def resume(self, training: Training) -> bool:
        """Go on where the file left off; False if the run begins anew.

        A file that cannot be used is not an error: from the beginning the numbers are the same.
        """
        if self.path is None or not self.path.exists():
            return False
        try:
            training.load_state_dict(read(self.path))
        except StaleCheckpoint as error:
            warnings.warn(f"{error} The run begins anew.", stacklevel=2)
            return False
        return True

    def due(self) -> bool:
        """Whether it is time to write again."""
        return self.path is not None and time.monotonic() - self.last >= self.wait

    def save(self, training: Training) -> None:
        if self.path is None:
            return
        start = time.monotonic()
        write(training.state_dict(), self.path)
        self.wrote(start)

    def wrote(self, start: float) -> None:
        """A file has been written since then."""
        self.last = time.monotonic()
        self.wait = max(self.every, (self.last - start) / SHARE if self.every else 0.0)


def write(state: dict[str, Any], path: Path) -> None:
    """The whole file or nothing: a reader never sees half of it, and two writers not each other."""

    def save(temporary: Path) -> None:
        with temporary.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())

    atomic_write(path, save)


def checkpoint_place(path: Path) -> tuple[int, int]:
    """Epochs that are complete in a checkpoint, and steps of the next; tensors are not read."""
    state = read(path, mmap=True)
    try:
        return int(state["epoch"]), int(state["at"])
    except (KeyError, TypeError, ValueError) as error:
        raise StaleCheckpoint(f"{path.name} does not say how far it is.") from error


def read(path: Path, *, mmap: bool = False) -> dict[str, Any]:
    """Tensors and plain values only: a file cannot run code."""
    try:
        state: dict[str, Any] = torch.load(
            path, map_location="cpu", weights_only=True, mmap=mmap or None
        )
    except Exception as error:  # of the archive, of the pickle, of whatever stands there instead
        reason = " ".join(str(error).split())[:200]
        raise StaleCheckpoint(
            f"{path.name} cannot be read: {type(error).__name__}: {reason}."
        ) from error
    return state


def state_of(training: Training) -> dict[str, Any]:
    """All that is needed to go on with the same numbers; the tensors are those in use."""
    device, clock = training.run_device, training.clock
    running = clock.running
    with device.on_stream():
        clock.stop()
        state = {
            **_identity(training),
            "epoch": training.epoch,
            "at": training.at,
            "seconds": clock.read(),
            "records": [asdict(record) for record in training.records],
            "note": training.note,
            "random": device.random.state(),
            "machine": training.trainer.state_dict(),
        }
        device.wait()
        if running:  # what is done with the state is not training
            clock.start()
    return state


def load_state(training: Training, state: dict[str, Any]) -> None:
    """A state of another run or machine is refused before anything is changed."""
    check_state(training, state)
    with training.run_device.on_stream():
        training.trainer.load_state_dict(state["machine"])
    training.epoch, training.at, training.note = state["epoch"], state["at"], state["note"]
    training.records = [Epoch(**record) for record in state["records"]]
    training.run_device.random.load(state["random"])
    training.clock = Clock(training.device, state["seconds"])


def check_state(training: Training, state: dict[str, Any]) -> None:
    for name, mine in _identity(training).items():
        if state.get(name) != mine:
            raise StaleCheckpoint(
                f"The checkpoint was made with {name} {state.get(name)!r}, and this is {mine!r}."
            )


def _identity(training: Training) -> dict[str, Any]:
    """Where these differ, numbers would differ too."""
    return {
        "protocol": PROTOCOL,
        "run": training.run.id,
        "device": device_name(training.device),
        "torch": str(torch.__version__),
    }
