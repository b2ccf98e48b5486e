"""What the launcher needs of whatever trains its jobs: local processes, or Ray."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from normkit.lab.sweep.messages import Job, Message


class Engine(Protocol):
    """Trains jobs somewhere else and tells about them."""

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
