"""What a diagnosis consists of: findings, each of a kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from normkit import catalog
from normkit.errors import OptionError, nearest

SEVERITIES = ("serious", "warning", "note")
"""From the worst: wrong results; a danger to results; worth knowing. The first two are alarms."""


class HasPath(Protocol):
    """A norm, by its path in the model."""

    @property
    def path(self) -> str: ...


@dataclass(frozen=True)
class Finding:
    """One thing that is not as it should be, where, and what to do about it.

    ``remedy`` is a line of Python in which ``nk`` is normkit and the other names are those of
    ``diagnose``'s arguments: ``model``, ``loader``, ``train_loader``, ``optimizer``.
    """

    kind: str
    severity: str
    path: str  # the layer that is worst; "" for the model or its data as a whole
    paths: tuple[str, ...]  # every layer concerned, in the order of the model
    said: str  # what is wrong, with the numbers; a key of JSON files
    numbers: Mapping[str, float | int | str | bool | None]
    why: str  # why it matters
    paper: str
    remedy: str
    missing: str = ""  # what else would have to be given to decide between causes
    consequences: tuple[Finding, ...] = ()  # findings that this one explains

    @property
    def alarm(self) -> bool:
        return self.severity != "note"

    def to_dict(self) -> dict[str, Any]:
        """In values that JSON can hold."""
        return {
            **vars(self),
            "paths": list(self.paths),
            "numbers": dict(self.numbers),
            "consequences": [each.to_dict() for each in self.consequences],
        }

    def explaining(self, consequences: Sequence[Finding]) -> Finding:
        """With findings folded under it; it is as severe as the worst of them."""
        worst = min([self, *consequences], key=lambda finding: rank_of(finding.severity))
        return replace(self, severity=worst.severity, consequences=tuple(consequences))


@dataclass(frozen=True)
class Kind:
    """What all findings of a kind have in common."""

    name: str
    title: str
    why: str
    paper: str
    spoils: bool = False
    """Whether it explains that the statistics of a layer do not fit the data."""
    brings: tuple[str, ...] = ()
    """Kinds that it brings about in the layers behind it, or in its own."""

    def finding(
        self,
        severity: str,
        norms: Sequence[HasPath | str],
        said: str,
        *,
        remedy: str,
        missing: str = "",
        worst: HasPath | str | None = None,
        **numbers: float | int | str | bool | None,
    ) -> Finding:
        """A finding of this kind; the first norm is the worst unless another one is named."""
        paths = paths_of(norms)
        path = (paths[0] if paths else "") if worst is None else paths_of([worst])[0]
        return Finding(
            kind=self.name,
            severity=severity,
            path=path,
            paths=tuple(paths),
            said=said,
            numbers=numbers,
            why=self.why,
            paper=self.paper,
            remedy=remedy,
            missing=missing,
        )


@dataclass(frozen=True)
class Undecided:
    """A question that could not be answered with what was given."""

    question: str
    give: str  # the argument of diagnose that would answer it
    kinds: tuple[str, ...] = field(default=())


def rank_of(severity: str) -> int:
    """0 for the worst severity; an error for a word that is none."""
    if severity not in SEVERITIES:
        raise OptionError(f"Unknown severity {severity!r}. {nearest(str(severity), SEVERITIES)}")
    return SEVERITIES.index(severity)


def plural(severity: str, count: int) -> str:
    """1 note, 2 notes; but 2 serious."""
    return severity if count == 1 or severity == "serious" else f"{severity}s"


def paths_of(norms: Sequence[HasPath | str]) -> list[str]:
    return [norm if isinstance(norm, str) else norm.path for norm in norms]


def places(norms: Sequence[HasPath | str], most: int = 3) -> str:
    """Paths in a sentence: the first few, and how many more."""
    names = [named(path) for path in paths_of(norms)]
    if len(names) <= most:
        return " and ".join(filter(None, (", ".join(names[:-1]), names[-1]))) if names else ""
    return f"{', '.join(names[:most])} and {len(names) - most} more"


def named(path: str) -> str:
    """A path in a sentence: numbers alone, as of a Sequential, say that they are a layer."""
    if not path:
        return "the model"
    return path if any(map(str.isalpha, path)) else f"layer {path}"


def listed(norms: Sequence[HasPath | str]) -> str:
    """Paths as code: 'a', or ['a', 'b']."""
    paths = paths_of(norms)
    return repr(paths[0]) if len(paths) == 1 else repr(paths)


def conversion(kind: Kind, norms: Sequence[HasPath | str] = (), options: str = "") -> str:
    """The line that converts norms to the layer whose card says that it cures this kind."""
    every = (catalog.find(name).card for name in catalog.names("activation"))
    name = next(card.name for card in every if kind.name in card.cures)
    where = f", where={listed(norms)}" if norms else ""
    return f"nk.convert(model, {name!r}{options}{where})"


class EarlierFindings:
    """Findings of earlier examiners, so that a symptom is not reported beside its cause."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self.spoiled: frozenset[str] = frozenset()
        """Norms whose statistics are known to be wrong, and why."""

    def add(self, finding: Finding, spoils: bool) -> None:
        self.findings.append(finding)
        if spoils:
            self.spoiled |= frozenset(finding.paths)

    def paths(self, *kinds: str) -> frozenset[str]:
        """Norms with a finding of one of these kinds."""
        return frozenset(p for f in self.findings if f.kind in kinds for p in f.paths)

    @property
    def alarm(self) -> bool:
        return any(finding.alarm for finding in self.findings)
