"""The confusion table: what was injected, and what was found."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from normkit.diagnosis.diagnosis import Diagnosis
from tools.diseases import accidents, layers, statistics, training
from tools.diseases.healthy import HEALTHY as MODELS
from tools.diseases.reference_models import Digits, Disease, HealthyModel, ReferenceModels

HEALTHY: tuple[HealthyModel, ...] = (*MODELS, *accidents.HEALTHY)
DISEASES: tuple[Disease, ...] = (
    *statistics.DISEASES,
    *training.DISEASES,
    *layers.DISEASES,
    *accidents.DISEASES,
)


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
    def named(self) -> bool:
        """Named in any place."""
        return self.expected in self.alarms


def run_trials(
    digits: Digits,
    seeds: Iterable[int] = (0,),
    only: Callable[[str], bool] = lambda name: True,
    done: Callable[[Trial], None] = lambda trial: None,
) -> list[Trial]:
    """Diagnose all healthy models and all diseases, for each seed."""
    trials = []
    for seed in seeds:
        for trial in trials_of(ReferenceModels(digits, seed), only):
            trials.append(trial)
            done(trial)
    return trials


def trials_of(
    models: ReferenceModels, only: Callable[[str], bool] = lambda name: True
) -> Iterator[Trial]:
    everything: list[HealthyModel | Disease] = [*HEALTHY, *DISEASES]
    for each in everything:
        if only(each.name):
            yield try_one(models, each)


def try_one(models: ReferenceModels, each: HealthyModel | Disease) -> Trial:
    if isinstance(each, HealthyModel):
        diagnosis = each.make(models).diagnose()
        return Trial(each.name, each.about, None, models.seed, _alarms(diagnosis))
    diagnosis = each.inject(models).diagnose()
    kinds = [finding.kind for finding in diagnosis]
    place = kinds.index(each.finding) if each.finding in kinds else None
    return Trial(
        each.name,
        each.story,
        each.finding,
        models.seed,
        _alarms(diagnosis),
        None if place is None else diagnosis.findings[place].severity,
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
            named = f"{sum(t.named for t in own)} of {len(own)}"
            severities = dict.fromkeys(t.severity for t in own if t.severity)
            others = [alarm for alarm in alarms if alarm != first.expected]
            ill.append(
                [
                    name,
                    first.about,
                    first.expected,
                    ", ".join(severities),
                    named,
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
        f"{sum(t.named for t in ill)} of {len(ill)} diseases found, "
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
