"""The result of a diagnosis: findings, and the numbers behind them."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from normkit.core.atomic_write import write_text
from normkit.core.messages import counted
from normkit.diagnosis.attribution import GapAttribution
from normkit.diagnosis.findings.finding import (
    SEVERITIES,
    Finding,
    Undecided,
    named,
    plural,
    rank_of,
)
from normkit.errors import OptionError

WIDTH = 96


@dataclass(frozen=True)
class LayerNumbers:
    """What was measured at one norm; measures without a meaning for it are left out."""

    path: str
    kind: str
    where: str  # in words: "stem", "block 3, norm 2 (last)"
    channels: int | None
    numbers: dict[str, float]


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """What is wrong with the norms of a model, the worst first. ``print`` it for a report.

    ``findings`` are ranked, each with its ``consequences`` folded under it; ``worst`` is the
    severity of the first, None if there is none, and ``healthy`` means that there is no alarm, that
    is nothing but notes. ``layers`` are in the order in which they run, ``cosines`` between the
    samples of a batch by path, ``gap`` how much of the difference between batch and running
    statistics enters where.
    """

    model: str
    findings: tuple[Finding, ...]
    undecided: tuple[Undecided, ...] = ()
    layers: tuple[LayerNumbers, ...] = ()
    cosines: dict[str, list[list[float]]] = field(default_factory=dict)
    gap: GapAttribution | None = None
    facts: dict[str, Any] = field(default_factory=dict)  # samples, batches, modes, versions

    @property
    def worst(self) -> str | None:
        return self.findings[0].severity if self.findings else None

    @property
    def healthy(self) -> bool:
        return not any(finding.alarm for finding in self.findings)

    def at_least(self, severity: str) -> tuple[Finding, ...]:
        """The findings of this severity or worse: "note", "warning" or "serious"."""
        limit = rank_of(severity)
        return tuple(x for x in self.findings if rank_of(x.severity) <= limit)

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def __len__(self) -> int:
        return len(self.findings)

    def __repr__(self) -> str:
        return f"<Diagnosis of {self.model}: {self.verdict}>"

    @property
    def verdict(self) -> str:
        """The result in a few words."""
        counts = {s: len([x for x in self.findings if x.severity == s]) for s in SEVERITIES}
        if not any(counts.values()):
            return "nothing found"
        return ", ".join(f"{n} {plural(s, n)}" for s, n in counts.items() if n)

    def __str__(self) -> str:
        lines = [f"Diagnosis of {self.model}: {self.verdict}", self._basis(), ""]
        for number, finding in enumerate(self.findings, 1):
            lines += _in_words(number, finding)
        if self.gap is not None and self.gap.is_gap:
            lines += [*str(self.gap).splitlines(), ""]
        if self.undecided:
            lines.append("Not decided with what was given:")
            for each in self.undecided:
                lines += _wrapped(f"{each.question} Give {each.give}.", "  - ")
        return "\n".join(lines).rstrip()

    def _basis(self) -> str:
        facts = self.facts
        return (
            f"{counted(len(self.layers), 'norm')}, {counted(facts.get('samples', 0), 'sample')} in "
            f"{counted(facts.get('batches', 0), 'batch')}"
        )

    # ---------------------------------------------------------------- files

    def to_dict(self) -> dict[str, Any]:
        """Everything, in values that JSON can hold; numbers that are not finite are None."""
        gap = self.gap
        content = {
            "model": self.model,
            "verdict": self.verdict,
            "worst": self.worst,
            "healthy": self.healthy,
            "facts": self.facts,
            "findings": [finding.to_dict() for finding in self.findings],
            "undecided": [{**vars(x), "kinds": list(x.kinds)} for x in self.undecided],
            "layers": [vars(layer) for layer in self.layers],
            "gap": None
            if gap is None
            else {
                "eval_loss": gap.eval_loss,
                "train_loss": gap.train_loss,
                "gap": gap.gap,
                "standard_error": gap.standard_error,
                "method": gap.method,
                "shares": gap.shares,
            },
            "cosines": self.cosines,
        }
        return _plain(content)

    def to_json(self, path: str | Path | None = None) -> str:
        """The same as text; written to a file if a path is given."""
        text = json.dumps(self.to_dict(), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        if path is not None:
            _write("to_json", path, text)
        return text

    def to_html(self, path: str | Path | None = None) -> str:
        """One page that needs no network, with charts of all layers; written if a path is given."""
        from normkit.diagnosis.report import page

        text = page(self)
        if path is not None:
            _write("to_html", path, text)
        return text


def _write(method: str, path: str | Path, text: str) -> None:
    folder = Path(path).parent
    if not folder.is_dir():
        raise OptionError(f"{method}(path={str(path)!r}): there is no folder {str(folder)!r}.")
    if Path(path).is_dir():
        raise OptionError(f"{method}(path={str(path)!r}) is a folder, expected a file's name.")
    write_text(path, text)


def _in_words(number: int, finding: Finding) -> list[str]:
    lines = [f"{number}. {finding.severity}: {_title(finding)}"]
    lines += _wrapped(finding.said, "   ")
    lines += _wrapped(f"Why it matters: {finding.why}", "   ")
    if finding.paper:
        lines += _wrapped(f"See: {finding.paper}", "   ")
    if finding.missing:
        lines += _wrapped(f"To be sure: {finding.missing}", "   ")
    for each in finding.consequences:
        lines += _wrapped(f"Brings with it: {_title(each)}. {each.said}", "   ")
    return [*lines, f"   Try: {finding.remedy}", ""]


def _title(finding: Finding) -> str:
    from normkit.diagnosis.findings.examine import KINDS

    title = KINDS[finding.kind].title if finding.kind in KINDS else finding.kind
    place = f" at {named(finding.path)}" if finding.path else ""
    return f"{title}{place} [{finding.kind}]"


def _wrapped(text: str, start: str) -> list[str]:
    rest = " " * len(start)
    return textwrap.wrap(text, WIDTH, initial_indent=start, subsequent_indent=rest)


def _plain(value: Any) -> Any:
    """Without numbers that JSON has not."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value
