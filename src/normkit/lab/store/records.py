"""What the store says about a run."""

from __future__ import annotations

from dataclasses import dataclass

WAITING, CLAIMED, DONE, FAILED = "waiting", "claimed", "done", "failed"


@dataclass(frozen=True)
class State:
    """Where a run stands. A divergence is a result, and so it is "done"."""

    run: str  # id
    state: str  # WAITING, CLAIMED, DONE or FAILED
    owner: str | None = None  # the launcher that has claimed it
    reason: str = ""  # why it failed
    epoch: int = 0  # the last one told, of a run that is not done
