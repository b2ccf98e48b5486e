"""What the committed results say about a claim, by the lab's own statistics."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from normkit.lab.experiment import Cell, Experiment, Variant
from normkit.lab.results import DONE, Result
from normkit.lab.statistics import UNSTABLE, compare, decide
from tools.evidence.claims import (
    BETTER,
    EQUIVALENT,
    NOT_BETTER,
    NOT_WORSE,
    WORSE,
    Claim,
    experiment_of,
    is_in,
)

HOLDS, FAILS, CONTRADICTED = "holds", "does not hold", "contradicted"
NOT_RUN = "not run"
# what a verdict of the lab means for what was expected; others, such as "unstable", stay
MEANING = {
    (BETTER, "better"): HOLDS,
    (BETTER, "equivalent"): FAILS,
    (BETTER, "worse"): CONTRADICTED,
    (WORSE, "worse"): HOLDS,
    (WORSE, "equivalent"): FAILS,
    (WORSE, "better"): CONTRADICTED,
    (EQUIVALENT, "equivalent"): HOLDS,
    (EQUIVALENT, "better"): FAILS,
    (EQUIVALENT, "worse"): FAILS,
    (NOT_BETTER, "better"): CONTRADICTED,
    (NOT_BETTER, "equivalent"): HOLDS,
    (NOT_BETTER, "worse"): HOLDS,
    (NOT_WORSE, "better"): HOLDS,
    (NOT_WORSE, "equivalent"): HOLDS,
    (NOT_WORSE, "worse"): CONTRADICTED,
}


@dataclass(frozen=True)
class ClaimRow:
    """A comparison that bears on a claim; differences are positive where the variant is better."""

    cell: Cell
    variant: str
    baseline: str
    pairs: int
    mean: float
    std: float
    baseline_mean: float
    baseline_std: float
    difference: float
    low: float
    high: float
    verdict: str  # of the lab
    answer: str  # what that means for the claim
    lost: int
    baseline_lost: int


def judge(claim: Claim, results: Mapping[str, Result]) -> list[ClaimRow]:
    """A row for each cell and variant of a claim; those without a pair are "not run".

    All rows of a claim are decided together: 5 % for all of them.
    """
    experiment = claim_experiment(claim)
    if claim.measure:
        return _judge_measure(claim, experiment, results)
    if claim.epoch:
        results = {run: at_epoch(result, claim.epoch) for run, result in results.items()}
    if not any(run.id in results for run in experiment.runs()):
        return []
    rows = []
    for each in compare(experiment, results):
        ran = each.pairs or each.lost or each.baseline_lost
        answer = NOT_RUN
        if ran:
            losses = each.lost, each.baseline_lost
            answer = _answer(claim, each.variant, each.verdict, *losses)
        rows.append(
            ClaimRow(
                each.cell, each.variant, each.baseline, each.pairs, each.mean, each.std,
                each.baseline_mean, each.baseline_std, each.difference, each.low, each.high,
                each.verdict, answer, each.lost, each.baseline_lost,
            )
        )  # fmt: skip
    return rows


def claim_experiment(claim: Claim) -> Experiment:
    """The part of an experiment that decides a claim: its baseline, variants and cells."""
    whole = experiment_of(claim.file)
    baseline = claim.baseline or whole.baseline
    variants = tuple(
        variant
        for variant in whole.variants
        if variant.name in {baseline, *claim.expected} and is_in(variant.cell, claim.cell)
    )
    return dataclasses.replace(whole, baseline=baseline, variants=variants)


def at_epoch(result: Result, epoch: int) -> Result:
    """The same run, judged after another epoch; one that was not evaluated there as before."""
    evaluated = any(
        each.epoch == epoch and each.test_accuracy is not None for each in result.epochs
    )
    chosen = (epoch,) if evaluated and result.selected else result.selected
    return dataclasses.replace(result, selected=chosen)


def measured(result: Result, measure: str) -> float | None:
    """A measure of a run in one number, of which less is better; None if it was not taken.

    Mean over layers and over the epochs after the first step. Of "disturbance", what the largest
    error of the running statistics takes away from the accuracy; of "corruption", what damaged
    images do, on average.
    """
    values: list[float] = []
    for epoch in result.epochs:
        value = epoch.measures.get(measure)
        if epoch.epoch == 0 or value is None:
            continue
        if measure == "disturbance":
            values.append(value[0] - value[-1])
            continue
        if measure.startswith("corruption"):
            values.append(value[0] - statistics.fmean(value[1:]))
            continue
        each = [v for v in value if v is not None] if isinstance(value, list) else [value]
        values.append(statistics.fmean(each))
    return statistics.fmean(values) if values else None


def scores(
    experiment: Experiment, variant: Variant, results: Mapping[str, Result]
) -> tuple[list[float], int]:
    """What a variant scored, over the seeds that it survived, and how many it lost."""
    found = [results[run.id] for run in variant.runs(experiment.seeds) if run.id in results]
    kept = [each for each in found if each.outcome(experiment.metric) == DONE]
    values = [score for each in kept if (score := each.score(experiment.metric)) is not None]
    return values, len(found) - len(kept)


def _judge_measure(
    claim: Claim, experiment: Experiment, results: Mapping[str, Result]
) -> list[ClaimRow]:
    drafts = []
    for variant in experiment.variants:
        if variant.name != experiment.baseline:
            base = experiment.variant(experiment.baseline, variant.cell)
            mine, lost = _values(claim.measure, experiment, variant, results)
            other, base_lost = _values(claim.measure, experiment, base, results)
            both = [seed for seed in mine if seed in other]
            pairs = [mine[seed] for seed in both], [other[seed] for seed in both]
            drafts.append((variant, *pairs, lost, base_lost))
    if not any(ours or lost or base_lost for _, ours, _, lost, base_lost in drafts):
        return []
    family = [[b - a for a, b in zip(ours, theirs, strict=True)] for _, ours, theirs, *_ in drafts]
    # no difference of a measure is known to be too small to matter
    decisions = decide(family, margin=1e-12, stable=[not (d[3] or d[4]) for d in drafts])
    rows = []
    for draft, better, decision in zip(drafts, family, decisions, strict=True):
        variant, ours, theirs, lost, base_lost = draft
        answer = NOT_RUN
        if ours or lost or base_lost:
            answer = _answer(claim, variant.name, decision.verdict, lost, base_lost)
        rows.append(
            ClaimRow(
                variant.cell, variant.name, experiment.baseline, len(ours), _mean(ours),
                _std(ours), _mean(theirs), _std(theirs), _mean(better), decision.low,
                decision.high, decision.verdict, answer, lost, base_lost,
            )
        )  # fmt: skip
    return rows


def _values(
    measure: str, experiment: Experiment, variant: Variant, results: Mapping[str, Result]
) -> tuple[dict[int, float], int]:
    """A measure by seed, of the runs that were not lost; and how many were."""
    values: dict[int, float] = {}
    lost = 0
    for run in variant.runs(experiment.seeds):
        if (result := results.get(run.id)) is None:
            continue
        if result.outcome(experiment.metric) != DONE:
            lost += 1
        elif (value := measured(result, measure)) is not None:
            values[run.seed] = value
    return values, lost


def _answer(claim: Claim, variant: str, verdict: str, lost: int, base_lost: int) -> str:
    expected = claim.expected[variant]
    if expected == WORSE and verdict == UNSTABLE and lost and not base_lost:
        return HOLDS  # a run that fails is as bad as a run can be
    return MEANING.get((expected, verdict), verdict)


def _mean(values: list[float]) -> float:
    return statistics.fmean(values) if values else math.nan


def _std(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else math.nan
