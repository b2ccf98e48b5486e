"""What a run says while it trains."""

from __future__ import annotations

from dataclasses import dataclass

from normkit.lab.results import Epoch


@dataclass(frozen=True)
class Progress:
    """How far a run has come."""

    run: str  # id
    epochs: float  # trained so far; 2.5: in the middle of the third
    of: int
    loss: float | None = None  # of the last epoch that is complete
    record: Epoch | None = None  # of an epoch that has just ended
