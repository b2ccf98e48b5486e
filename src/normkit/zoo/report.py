"""What is to be tried, and what came of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Task:
    """A model to try, on the meta device or in earnest."""

    reference: str
    targets: tuple[str, ...]
    runs: bool = False

    @property
    def name(self) -> str:
        """What the result is filed under."""
        return f"{'run' if self.runs else 'meta'} {self.reference}"


@dataclass
class Outcome:
    """What came of one target."""

    converted: int = 0
    kept: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    """How many norms were left as they are, by reason."""
    exact: bool = False
    """Whether the plan says that the output in eval mode stays what it is."""
    difference: float | None = None
    """Of the output in eval mode, relative; None where the model was not run."""
    wide: float | None = None
    """The same in double precision, where rounding made it larger than exactness allows."""
    failures: list[str] = field(default_factory=list)


@dataclass
class Report:
    """What came of a model."""

    norms: int = 0
    input: str = ""
    """What it was run on; empty if it was not."""
    seconds: float = 0.0
    """Of computing, not of waiting for a core."""
    failures: list[str] = field(default_factory=list)
    """What is wrong before any target."""
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    """By target."""

    @property
    def passed(self) -> bool:
        return not self.failures and not any(o.failures for o in self.outcomes.values())

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, facts: dict[str, Any]) -> Report:
        """The report that ``to_dict`` was taken of."""
        outcomes = {target: Outcome(**outcome) for target, outcome in facts["outcomes"].items()}
        return cls(**{**facts, "outcomes": outcomes})
