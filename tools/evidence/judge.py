"""What the committed results say about a claim, by the lab's own statistics."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from normkit.lab.experiment import Cell, Experiment, Variant
from normkit.lab.results import DONE, Result
from normkit.lab.statistics import UNSTABLE, compare, decide
from tools.evidence.claims import (
    ALL,
    BETTER,
    EQUIVALENT,
    SLIGHT,
    WORSE,
    Claim,
    experiment_of,
    is_in,
)

HOLDS, FAILS, CONTRADICTED = "holds", "does not hold", "contradicted"
NOT_RUN, NOT_SHOWN = "not run", "not shown"
HIGHER, LOWER = "higher", "lower"  # of accuracy that is left, of which papers claim nothing
NO_TREND = "no trend"  # what a rank correlation is compared with
LEFT = "_left"  # of a measure of lost accuracy: what is left of it, more is better
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
    (SLIGHT, "equivalent"): HOLDS,
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
    expected: str  # by the claim
    lost: int
    baseline_lost: int

    @property
    def said(self) -> str:
        """The answer; where nothing is shown, with the side on which the mean lies."""
        if self.answer != NOT_SHOWN or not self.pairs:
            return self.answer
        if self.verdict in (BETTER, WORSE):
            return f"{self.verdict}, not shown whether slightly"
        if self.expected in (EQUIVALENT, SLIGHT):
            return f"{self.answer}, no difference found"
        towards = (self.difference > 0) == (self.expected == BETTER)
        return f"{self.answer}, leans {'towards' if towards else 'against'} it"


def judge(claim: Claim, results: Mapping[str, Result]) -> list[ClaimRow]:
    """A row for each cell and variant of a claim; those without a pair are "not run".

    All rows of a claim are decided together: 5 % for all of them. ``results`` may hold those of
    other experiments: a comparison has all seeds that any of them has trained.
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
            if claim.expected[each.variant] == SLIGHT and each.verdict in (BETTER, WORSE):
                answer = _slight(each.low, each.high, experiment.equivalence)
        rows.append(
            ClaimRow(
                each.cell, each.variant, each.baseline, each.pairs, each.mean, each.std,
                each.baseline_mean, each.baseline_std, each.difference, each.low, each.high,
                each.verdict, answer, claim.expected[each.variant], each.lost, each.baseline_lost,
            )
        )  # fmt: skip
    return rows


def judge_left(claim: Claim, results: Mapping[str, Result]) -> list[ClaimRow]:
    """Of a claim about lost accuracy what is left of it: who has less can lose less."""
    rows = judge(dataclasses.replace(claim, measure=claim.measure + LEFT), results)
    words = {BETTER: HIGHER, WORSE: LOWER, NOT_SHOWN: "neither shown"}
    return [
        row
        if row.answer == NOT_RUN
        else dataclasses.replace(row, answer=words.get(row.verdict, row.verdict))
        for row in rows
    ]


def claim_experiment(claim: Claim) -> Experiment:
    """The part of an experiment that decides a claim: its baseline, variants and cells."""
    whole = experiment_of(claim.file)
    baseline = claim.baseline or whole.baseline
    variants = tuple(
        variant
        for variant in whole.variants
        if variant.name in {baseline, *claim.expected} and is_in(variant.cell, claim.cell)
    )
    return dataclasses.replace(whole, baseline=baseline, variants=variants, seeds=all_seeds())


@cache
def all_seeds() -> tuple[int, ...]:
    """Of the experiment that has most: others may have the same runs."""
    return max((experiment_of(claim.file).seeds for claim in ALL), key=len)


def at_epoch(result: Result, epoch: int) -> Result:
    """The same run, judged after another epoch; one that was not evaluated there as before."""
    evaluated = any(
        each.epoch == epoch and each.test_accuracy is not None for each in result.epochs
    )
    chosen = (epoch,) if evaluated and result.selected else result.selected
    return dataclasses.replace(result, selected=chosen)


def measured(result: Result, measure: str, layers: Collection[int] | None = None) -> float | None:
    """A measure of a run in one number, of which less is better; None if it was not taken.

    Mean over layers and over the epochs after the first step. Of "disturbance", what the largest
    error of the running statistics takes away from the accuracy; of "corruption", what damaged
    images do, on average; with "_left", what they leave. Of a "_trend", the rank correlation with
    depth at the end: more is meant to be better there too.
    """
    if measure.endswith("_trend"):
        value = result.epochs[-1].measures.get(measure.removesuffix("_trend"))
        return None if value is None else rank_correlation([v for v in value if v is not None])
    left = measure.endswith(LEFT)
    measure = measure.removesuffix(LEFT)
    values: list[float] = []
    for epoch in result.epochs:
        value = epoch.measures.get(measure)
        if epoch.epoch == 0 or value is None:
            continue
        if measure == "disturbance":
            values.append(value[-1] if left else value[0] - value[-1])
            continue
        if measure.startswith("corruption"):
            damaged = statistics.fmean(value[1:])
            values.append(damaged if left else value[0] - damaged)
            continue
        known = enumerate(value if isinstance(value, list) else [value])
        wanted = [v for i, v in known if v is not None and (layers is None or i in layers)]
        values.append(statistics.fmean(wanted))
    return statistics.fmean(values) if values else None


def rank_correlation(values: Sequence[float]) -> float:
    """Spearman's, of values with their places: 1 where they grow all along."""
    ranks = [
        sum(other < each for other in values) + (sum(other == each for other in values) - 1) / 2
        for each in values
    ]
    return statistics.correlation(range(len(ranks)), ranks)


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
    trend = claim.measure.endswith("_trend")
    for variant in experiment.variants:
        if trend or variant.name != experiment.baseline:
            base = experiment.variant(experiment.baseline, variant.cell)
            layers = None if trend else _shared_layers(claim.measure, experiment, variant, results)
            mine, lost = _values(claim.measure, experiment, variant, results, layers)
            other, base_lost = _values(claim.measure, experiment, base, results, layers)
            both = [seed for seed in mine if seed in other]
            pairs = [mine[seed] for seed in both], [0.0 if trend else other[seed] for seed in both]
            drafts.append((variant, *pairs, lost, base_lost))
    if not any(ours or lost or base_lost for _, ours, _, lost, base_lost in drafts):
        return []
    sign = 1 if trend or claim.measure.endswith(LEFT) else -1  # of others less is better
    family = [
        [sign * (a - b) for a, b in zip(ours, theirs, strict=True)]
        for _, ours, theirs, *_ in drafts
    ]
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
                variant.cell, variant.name, NO_TREND if trend else experiment.baseline,
                len(ours), _mean(ours),
                _std(ours), _mean(theirs), _std(theirs), _mean(better), decision.low,
                decision.high, decision.verdict, answer, claim.expected[variant.name],
                lost, base_lost,
            )
        )  # fmt: skip
    return rows


def _values(
    measure: str,
    experiment: Experiment,
    variant: Variant,
    results: Mapping[str, Result],
    layers: Collection[int] | None = None,
) -> tuple[dict[int, float], int]:
    """A measure by seed, of the runs that were not lost; and how many were."""
    values: dict[int, float] = {}
    lost = 0
    for run in variant.runs(experiment.seeds):
        if (result := results.get(run.id)) is None:
            continue
        if result.outcome(experiment.metric) != DONE:
            lost += 1
        elif (value := measured(result, measure, layers)) is not None:
            values[run.seed] = value
    return values, lost


def _shared_layers(
    measure: str, experiment: Experiment, variant: Variant, results: Mapping[str, Result]
) -> set[int] | None:
    """The layers in which both sides have a measure that is taken layer by layer."""
    if not measure.startswith("esm"):
        return None
    shared: set[int] | None = None
    for each in (variant, experiment.variant(experiment.baseline, variant.cell)):
        for run in each.runs(experiment.seeds):
            result = results.get(run.id)
            if result is not None and (value := result.epochs[-1].measures.get(measure)):
                own = {layer for layer, v in enumerate(value) if v is not None}
                shared = own if shared is None else shared & own
    return shared


def _answer(claim: Claim, variant: str, verdict: str, lost: int, base_lost: int) -> str:
    expected = claim.expected[variant]
    if expected == WORSE and verdict == UNSTABLE and lost and not base_lost:
        return HOLDS  # a run that fails is as bad as a run can be
    return MEANING.get((expected, verdict), verdict)


def _slight(low: float, high: float, margin: float) -> str:
    """A difference that is there: small, large, or not known to be either."""
    if -margin < low and high < margin:
        return HOLDS
    return FAILS if low > margin or high < -margin else NOT_SHOWN


def _mean(values: list[float]) -> float:
    return statistics.fmean(values) if values else math.nan


def _std(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else math.nan
