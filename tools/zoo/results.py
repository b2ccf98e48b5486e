"""What is tried, what came of it, and where that is kept and summed up."""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import normkit
from normkit.errors import OptionError

# the parts of normkit that a trial depends on
CONVERSION = ("core", "engine", "layers", "catalog.py", "inspection", "conversion")
COUNTS = ("models", "failed", "norms", "converted", "kept", "skipped", "exact")
MEASURED = ("their largest difference", "in double precision")
HEAD = ("target", "tried", *COUNTS, *MEASURED)
TRIED = {"meta": "on meta", "run": "run"}


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


class Records:
    """A file of JSON lines. A later line replaces an earlier one of the same name.

    Each line has a stamp, which says under what it was found. Lines with another stamp do not
    count: a new version of a library, or a change to normkit, makes a sweep begin again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.exists() and path.read_bytes()[:1] not in (b"", b"{"):
            raise OptionError(f"{path} is not a file of zoo results. Try another name.")

    def add(self, stamp: str, name: str, facts: dict[str, Any]) -> None:
        line = json.dumps({"stamp": stamp, "name": name, **facts}, ensure_ascii=False)
        with self.path.open("a+b") as file:
            # after an interruption the last line may be half a line: it stays alone
            file.seek(0, 2)
            if file.tell():
                file.seek(-1, 2)
                line = line if file.read(1) == b"\n" else f"\n{line}"
            file.write(f"{line}\n".encode())

    def read(self, stamp: str) -> dict[str, dict[str, Any]]:
        """What is known under this stamp, by name."""
        return {line.pop("name"): line for line in self._lines() if line.pop("stamp") == stamp}

    def _lines(self) -> Iterator[dict[str, Any]]:
        if not self.path.exists():
            return
        for text in self.path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                line = json.loads(text)
            except json.JSONDecodeError:  # see add
                continue
            if isinstance(line, dict) and {"stamp", "name"} <= line.keys():
                yield line


def versions() -> dict[str, str]:
    """What the models depend on."""
    return {
        "torch": torch.__version__,
        **{name: metadata.version(name) for name in ("timm", "torchvision")},
    }


def source_digest() -> str:
    """Changes when a file does that has to do with conversion."""
    root = Path(normkit.__file__).parent
    digest = hashlib.sha256()
    converting = (f for f in root.rglob("*.py") if f.relative_to(root).parts[0] in CONVERSION)
    for file in sorted([*converting, *Path(__file__).parent.glob("*.py")]):
        digest.update(f"{file.name}".encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def overview(reports: dict[str, Report]) -> list[tuple[str, ...]]:
    """One row a target and way of trying, under HEAD. Differences are those of exact models."""
    sums: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    largest: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for name, report in reports.items():
        way = name.partition(" ")[0]
        for target, outcome in report.outcomes.items():
            sums[target, way].update(
                models=1,
                failed=bool(outcome.failures),
                norms=report.norms,
                converted=outcome.converted,
                kept=outcome.kept,
                skipped=sum(outcome.skipped.values()),
                exact=outcome.exact,
            )
            for column, value in zip(MEASURED, (outcome.difference, outcome.wide), strict=True):
                if value is not None and outcome.exact:
                    before = largest[target, way]
                    before[column] = max(before[column], value)  # type: ignore[assignment]
    return [
        (
            *(target, TRIED[way]),
            *(f"{total[column]:,}" for column in COUNTS),
            *(_number(largest[target, way].get(column)) for column in MEASURED),
        )
        for (target, way), total in sorted(sums.items(), key=lambda item: item[0][1])
    ]


def reasons(reports: dict[str, Report]) -> list[tuple[str, int, int]]:
    """Why norms were skipped: reason, norms, models. A norm counts once, whatever the target."""
    norms: Counter[str] = Counter()
    models: Counter[str] = Counter()
    for report in reports.values():
        most: Counter[str] = Counter()
        for outcome in report.outcomes.values():
            most |= Counter(outcome.skipped)
        norms += most
        models.update(most.keys())
    return [(reason, count, models[reason]) for reason, count in norms.most_common()]


def failures(reports: dict[str, Report]) -> list[tuple[str, str, str, str]]:
    """Model, way of trying, target and what is wrong."""
    rows = []
    for name, report in sorted(reports.items()):
        way, _, reference = name.partition(" ")
        rows += [(reference, TRIED[way], "", failure) for failure in report.failures]
        for target, outcome in report.outcomes.items():
            rows += [(reference, TRIED[way], target, failure) for failure in outcome.failures]
    return rows


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"
