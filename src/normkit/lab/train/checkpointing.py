"""Files from which a run goes on after an interruption, with the numbers it would have had."""

from __future__ import annotations

import os
import time
import warnings
from pathlib import Path
from typing import Any, Protocol

import torch

from normkit.core.atomic_write import atomic_write
from normkit.errors import NormkitError

EVERY = 30.0  # seconds between two files
SHARE = 0.02  # of the time at most is spent on writing them


class Resumable(Protocol):
    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class StaleCheckpoint(NormkitError):
    """A checkpoint that cannot be used: damaged, or of another run, device or version of torch."""


class Keeper:
    """Writes a training to a file now and then, and reads it again. Without a path, neither."""

    def __init__(self, path: Path | None, every: float = EVERY) -> None:
        self.path, self.every = path, every
        self.wait = every
        self.last = time.monotonic()

    def resume(self, training: Resumable) -> bool:
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

    def save(self, training: Resumable) -> None:
        if self.path is None:
            return
        start = time.monotonic()
        write(training.state_dict(), self.path)
        self.last = time.monotonic()
        self.wait = max(self.every, (self.last - start) / SHARE if self.every else 0.0)


def write(state: dict[str, Any], path: Path) -> None:
    """The whole file or nothing: a reader never sees half of it, and two writers not each other."""
    atomic_write(path, lambda beside: _save(state, beside))


def _save(state: dict[str, Any], path: Path) -> None:
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def read(path: Path) -> dict[str, Any]:
    """Tensors and plain values only: a file cannot run code."""
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of the archive, of the pickle, of whatever stands there instead
        said = " ".join(str(error).split())[:200]
        raise StaleCheckpoint(
            f"{path.name} cannot be read: {type(error).__name__}: {said}."
        ) from error
    return state
