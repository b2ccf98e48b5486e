"""The confusion table: what was injected, and what was found."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from normkit.diagnosis.diagnosis import Diagnosis
from normkit.diagnosis.diseases.catalog import DISEASES
from normkit.diagnosis.diseases.healthy import HEALTHY
from normkit.diagnosis.diseases.patient import Disease, Reference
from normkit.diagnosis.diseases.ward import Ward

Pairs = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]
OK = "✓"


@dataclass(frozen=True)
class Trial:
    """One diagnosis: of a disease, or of a healthy model if ``expected`` is None."""

    name: str
    about: str
    expected: str | None
    seed: int
    alarms: tuple[str, ...]  # kinds of serious findings and warnings, the worst first
    severity: str | None = None  # of the expected finding
    rank: int | None = None  # its place among the findings, from 1

    @property
    def passed(self) -> bool:
        """Named in the first place; or, if healthy, not alarmed."""
        return not self.alarms if self.expected is None else self.rank == 1

    @property
    def found(self) -> bool:
        """Named in any place."""
        return self.expected in self.alarms


def run_trials(
    digits: Pairs,
    seeds: Iterable[int] = (0,),
    only: Callable[[str], bool] = lambda name: True,
    done: Callable[[Trial], None] = lambda trial: None,
) -> list[Trial]:
    """Diagnose all healthy models and all diseases, for each seed."""
    trials = []
    for seed in seeds:
        for trial in trials_of(Ward(digits, seed), only):
            trials.append(trial)
            done(trial)
    return trials


def trials_of(ward: Ward, only: Callable[[str], bool] = lambda name: True) -> Iterator[Trial]:
    everything: list[Reference | Disease] = [*HEALTHY, *DISEASES]
    for each in everything:
        if only(each.name):
            yield try_one(ward, each)


def try_one(ward: Ward, each: Reference | Disease) -> Trial:
    if isinstance(each, Reference):
        found = each.make(ward).diagnose()
        return Trial(each.name, each.about, None, ward.seed, _alarms(found))
    found = each.inject(ward).diagnose()
    kinds = [finding.kind for finding in found]
    place = kinds.index(each.finding) if each.finding in kinds else None
    return Trial(
        each.name,
        each.story,
        each.finding,
        ward.seed,
        _alarms(found),
        None if place is None else found.findings[place].severity,
        None if place is None else place + 1,
    )


def _alarms(diagnosis: Diagnosis) -> tuple[str, ...]:
    return tuple(finding.kind for finding in diagnosis if finding.alarm)


def rows_of(trials: Sequence[Trial]) -> tuple[list[list[str]], list[list[str]]]:
    """Rows of the two tables, healthy models and diseases, the seeds of each together."""
    healthy, ill = [], []
    for name in dict.fromkeys(trial.name for trial in trials):
        own = [trial for trial in trials if trial.name == name]
        alarms = dict.fromkeys(alarm for trial in own for alarm in trial.alarms)
        passed = f"{sum(t.passed for t in own)} of {len(own)}"
        first = own[0]
        if first.expected is None:
            healthy.append([name, first.about, passed, ", ".join(alarms) or "none"])
        else:
            found = f"{sum(t.found for t in own)} of {len(own)}"
            severities = dict.fromkeys(t.severity for t in own if t.severity)
            others = [alarm for alarm in alarms if alarm != first.expected]
            ill.append(
                [
                    name,
                    first.about,
                    first.expected,
                    ", ".join(severities),
                    found,
                    passed,
                    ", ".join(others) or "–",
                ]
            )
    return healthy, ill


HEALTHY_HEAD = ("model", "what it is", "without alarm", "alarms")
ILL_HEAD = ("disease", "how it was injected", "finding", "severity", "found", "first", "also found")


def verdict(trials: Sequence[Trial]) -> str:
    """The result in a sentence."""
    healthy = [t for t in trials if t.expected is None]
    ill = [t for t in trials if t.expected is not None]
    return (
        f"{sum(t.found for t in ill)} of {len(ill)} diseases found, "
        f"{sum(t.passed for t in ill)} named first; "
        f"{sum(not t.passed for t in healthy)} false alarms on {len(healthy)} healthy models."
    )


def to_markdown(trials: Sequence[Trial]) -> str:
    """Both tables as Markdown."""
    healthy, ill = rows_of(trials)
    return "\n".join(
        [
            verdict(trials),
            "",
            "## Healthy models",
            "",
            *_table(HEALTHY_HEAD, healthy),
            "",
            "## Diseases",
            "",
            *_table(ILL_HEAD, ill),
            "",
        ]
    )


def _table(head: Sequence[str], rows: list[list[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return [
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines
    ]
