"""What has not been run: stage by stage, in the order in which it is trained, and what it takes."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from normkit.lab.experiment import Cell, Experiment, Run, Variant
from normkit.lab.results import Result
from tools.evidence.claims import STAGES, Stage, experiment_of, stage_runs
from tools.evidence.words import where

WARM = "train.warmup"


@dataclass(frozen=True)
class MissingStage:
    """The runs of a stage that are neither there nor in a stage before it."""

    file: str
    what: str  # cells and variants, in words
    runs: tuple[Run, ...]
    seconds: float  # of a GPU, about; 0: nothing like it was run
    shared: bool  # known only from sweeps that shared their GPU: rather less


class RunCosts:
    """Seconds of a GPU that runs took: their part of the time of their sweep.

    Runs train side by side, so that their own seconds are several times what they cost.
    """

    def __init__(self, results: Mapping[str, Result], sweeps: Sequence[Mapping[str, Any]]) -> None:
        self.results, self.sweeps = results, sweeps

    def of(self, result: Result) -> float:
        number = result.environment.get("sweep")
        sweep = self.sweeps[int(number)] if number and self.sweeps else {}
        share = sweep["seconds"] / sweep["run_seconds"] if sweep else 1.0
        return float(share * result.seconds)

    def expected(self, experiment: Experiment, variant: Variant) -> tuple[float, bool]:
        """What a run of a variant takes, by those most like it that there are; whether shared.

        By runs of the same variant and cell with the other schedule, by those of the variant, by
        those of the experiment; in proportion to the epochs.
        """
        epochs = variant.setting.train.epochs
        same = [each for each in experiment.variants if each.name == variant.name]
        alike = [each for each in same if _without(each.cell) == _without(variant.cell)]
        for group in (alike, same, experiment.variants):
            seen = [
                (self.of(result) * epochs / each.setting.train.epochs, self._was_shared(result))
                for each in group
                for run in each.runs(experiment.seeds)
                if (result := self.results.get(run.id)) is not None
            ]
            if seen:
                alone = [cost for cost, shared in seen if not shared]
                return statistics.fmean(alone or [cost for cost, _ in seen]), not alone
        return 0.0, False

    def _was_shared(self, result: Result) -> bool:
        number = result.environment.get("sweep")
        return bool(number and self.sweeps and self.sweeps[int(number)].get("beside"))


def missing_stages(
    results: Mapping[str, Result],
    sweeps: Sequence[Mapping[str, Any]],
    stages: Sequence[Stage] = STAGES,
) -> list[MissingStage]:
    """In order; stages of which nothing is missing are left out."""
    costs, told, found = RunCosts(results, sweeps), set[str](), []
    for stage in stages:
        experiment = experiment_of(stage.file)
        runs = [each for each in stage_runs(stage) if each[1].id not in {*results, *told}]
        told |= {run.id for _, run in runs}
        if not runs:
            continue
        variants = [variant for variant, _ in runs]
        per_run = {(v.name, v.cell): costs.expected(experiment, v) for v in variants}
        spent = [per_run[variant.name, variant.cell] for variant in variants]
        found.append(
            MissingStage(
                stage.file,
                _in_words(experiment, variants),
                tuple(run for _, run in runs),
                sum(cost for cost, _ in spent),
                any(shared for _, shared in spent),
            )
        )
    return found


def plan_lines(found: Sequence[MissingStage]) -> Iterator[str]:
    """A line for each stage: runs, seconds, seconds so far."""
    yield f"{'runs':>5} {'seconds':>8} {'in all':>7}  missing"
    total = 0.0
    for stage in found:
        total += stage.seconds
        mark = "*" if stage.shared else " "
        seconds = f"{stage.seconds:.0f}{mark}" if stage.seconds else "? "
        yield f"{len(stage.runs):5} {seconds:>8} {total:7.0f}  {stage.file}: {stage.what}"
    yield "Seconds of a GPU like the one of the committed runs, by runs like these; each call takes"
    yield "half a minute more to start. * known from runs beside other work: rather less."


def _in_words(experiment: Experiment, variants: Sequence[Variant]) -> str:
    """Which values of the grid, where not all, and which variants, likewise."""
    words = []
    for key in dict.fromkeys(key for key, _ in experiment.variants[0].cell):
        values = [
            list(dict.fromkeys(dict(each.cell)[key] for each in group))
            for group in (variants, experiment.variants)
        ]
        if len(values[0]) < len(values[1]):
            words.append(_together([where(((key, value),)) for value in values[0]]))
    named, every = (list(dict.fromkeys(v.name for v in g)) for g in (variants, experiment.variants))
    if len(named) < len(every):
        words.append(" / ".join(named))
    return "; ".join(words) or "all that is left"


def _together(words: Sequence[str]) -> str:
    """
    >>> _together(["2 epochs", "12 epochs"]), _together(["batch size 32", "batch size 512"])
    ('2, 12 epochs', 'batch size 32, 512')
    """
    first, *rest = words
    head = re.match(r"\D*", first)
    tail = re.search(r"\D*$", first)
    assert head is not None and tail is not None
    if not rest or len(head[0]) == len(first):
        return ", ".join(words)
    numbers = ", ".join(re.sub(r"[^\d.]", "", each) for each in words)
    return f"{head[0]}{numbers}{tail[0]}"


def _without(cell: Cell) -> Cell:
    return tuple((key, value) for key, value in cell if key != WARM)
