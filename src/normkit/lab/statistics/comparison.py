"""From the results of an experiment to what they show."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from normkit.errors import OptionError
from normkit.lab.experiment import Experiment, Variant
from normkit.lab.results import COLLAPSED, DONE, FAILED, METRICS, Comparison, Result
from normkit.lab.statistics.family import NOT_SHOWN, Decision, decide
from normkit.lab.statistics.paired import effect, more_seeds, sign_flip


@dataclass(frozen=True)
class LostRuns:
    """How many runs of a variant gave no score that could be compared."""

    diverged: int = 0
    collapsed: int = 0
    failed: int = 0

    @classmethod
    def of(cls, outcomes: Sequence[str]) -> LostRuns:
        collapsed, failed = outcomes.count(COLLAPSED), outcomes.count(FAILED)
        return cls(len(outcomes) - outcomes.count(DONE) - collapsed - failed, collapsed, failed)

    def __bool__(self) -> bool:
        return bool(self.diverged or self.collapsed or self.failed)


@dataclass(frozen=True)
class Pairs:
    """What two variants did with the seeds that both survived, and the losses of each."""

    variant: Variant
    results: tuple[Result, ...]
    scores: tuple[float, ...]
    baseline_scores: tuple[float, ...]
    better: tuple[float, ...]  # differences, positive where the variant is better
    losses: LostRuns
    baseline_losses: LostRuns


def compare(
    experiment: Experiment, results: Mapping[str, Result], failures: Collection[str] = ()
) -> list[Comparison]:
    """Every variant against the baseline in every cell, by the results there are (id -> Result).

    ``failures`` are the ids of runs that an error has ended: lost, where one that has not been run
    is only not there yet. Runs that diverged, collapsed or failed are counted first. Where either
    side has lost one, the verdict is "unstable" (unless ``losses`` of the experiment lets survivors
    decide), and the numbers are those of the seeds that survived on both sides. All others
    are decided together (see ``family``): 5 %, two-sided, for the experiment as a whole, with
    Holm's correction for all comparisons that it asks for, finished or not.

    Where looks are planned, the seeds up to the last look that is complete are compared.

    With fewer than 2 pairs nothing is shown, and whatever they cannot tell is NaN: every test,
    the interval, the effect, the spread, and without any pair the means too.
    """
    if experiment.looks:
        seeds = experiment.seeds[: reached_look(experiment, results, failures)]
        experiment = replace(experiment, seeds=seeds)
    compared = [
        _pairs(experiment, variant, results, failures)
        for variant in experiment.variants
        if variant.name != experiment.baseline
    ]
    decisions = decide(
        [pairs.better for pairs in compared],
        experiment.equivalence,
        corrected=experiment.multiplicity == "holm",
        stable=[
            experiment.losses == "survivors" or not (pairs.losses or pairs.baseline_losses)
            for pairs in compared
        ],
        looks=experiment.looks,
    )
    return [
        _comparison(experiment, pairs, decision)
        for pairs, decision in zip(compared, decisions, strict=True)
    ]


def reached_look(
    experiment: Experiment, results: Mapping[str, Result], failures: Collection[str] = ()
) -> int:
    """After how many seeds the last planned look is for which every run is there; 0: none yet."""
    reached = 0
    for look in experiment.looks:
        first = experiment.seeds[:look]
        runs = (run.id for variant in experiment.variants for run in variant.runs(first))
        if len(first) < look or any(run not in results and run not in failures for run in runs):
            break
        reached = look
    return reached


def _pairs(
    experiment: Experiment,
    variant: Variant,
    results: Mapping[str, Result],
    failures: Collection[str],
) -> Pairs:
    """The results that belong together: of the same cell and seed."""
    try:
        baseline = experiment.variant(experiment.baseline, variant.cell)
    except KeyError:
        raise OptionError(
            f"{variant.name!r} has nothing to be compared with: the baseline "
            f"{experiment.baseline!r} is not in the cell {dict(variant.cell)}. "
            "Try to let the baseline be in every cell."
        ) from None

    outcomes: tuple[list[str], list[str]] = ([], [])

    def score_of(run: str, seen: list[str]) -> float | None:
        """None for a run that is not finished, or that was lost."""
        result = results.get(run)
        if result is None:
            seen += [FAILED] * (run in failures)
            return None
        seen.append(result.outcome(experiment.metric))
        return result.score(experiment.metric) if seen[-1] == DONE else None

    ours, scores, theirs = [], [], []
    for run, base in zip(
        variant.runs(experiment.seeds), baseline.runs(experiment.seeds), strict=True
    ):
        result = results.get(run.id)
        score = score_of(run.id, outcomes[0])
        target = score_of(base.id, outcomes[1])
        if result is not None and score is not None and target is not None:
            ours.append(result)
            scores.append(score)
            theirs.append(target)
    sign = 1 if experiment.higher_is_better else -1
    better = tuple(sign * (a - b) for a, b in zip(scores, theirs, strict=True))
    losses = map(LostRuns.of, outcomes)
    return Pairs(variant, tuple(ours), tuple(scores), tuple(theirs), better, *losses)


def _comparison(experiment: Experiment, pairs: Pairs, decision: Decision) -> Comparison:
    better = pairs.better
    several = len(better) > 1
    more = None
    if decision.verdict == NOT_SHOWN:
        more = more_seeds(better, experiment.equivalence, decision.alpha)
    reached = median_reach(
        pairs.results, pairs.baseline_scores, experiment.metric, experiment.higher_is_better
    )
    return Comparison(
        variant=pairs.variant.name,
        baseline=experiment.baseline,
        cell=pairs.variant.cell,
        pairs=len(better),
        mean=_mean(pairs.scores),
        std=_std(pairs.scores),
        baseline_mean=_mean(pairs.baseline_scores),
        baseline_std=_std(pairs.baseline_scores),
        difference=_mean(better),
        low=decision.low,
        high=decision.high,
        alpha=decision.alpha,
        effect=effect(better) if several else math.nan,
        p_better=decision.p_better,
        p_worse=decision.p_worse,
        p_difference=decision.p_difference,
        p_difference_holm=decision.p_difference_holm,
        p_sign_flip=sign_flip(better) if several else math.nan,
        p_equivalent=decision.p_equivalent,
        p_equivalent_holm=decision.p_equivalent_holm,
        verdict=decision.verdict,
        more_seeds=more,
        diverged=pairs.losses.diverged,
        collapsed=pairs.losses.collapsed,
        baseline_diverged=pairs.baseline_losses.diverged,
        baseline_collapsed=pairs.baseline_losses.collapsed,
        failed=pairs.losses.failed,
        baseline_failed=pairs.baseline_losses.failed,
        epochs_to_baseline=reached[0] if reached else None,
        seconds_to_baseline=reached[1] if reached else None,
    )


def _mean(scores: Sequence[float]) -> float:
    return statistics.fmean(scores) if scores else math.nan


def _std(scores: Sequence[float]) -> float:
    return statistics.stdev(scores) if len(scores) > 1 else math.nan


def reach(
    result: Result, target: float, metric: str, higher_is_better: bool | None = None
) -> tuple[int, float] | None:
    """The first epoch as good as a target on the test set, and the seconds until its end (UBN).

    None: it never was. Epochs that were not evaluated cannot count. Which way is better has to be
    said of metrics that classification does not have.
    """
    if higher_is_better is None:
        higher_is_better = METRICS[metric].higher_is_better
    for epoch in result.epochs:
        score = epoch.value(metric)
        if score is None or epoch.epoch == 0:
            continue
        if score >= target if higher_is_better else score <= target:
            return epoch.epoch, epoch.seconds
    return None


def median_reach(
    results: Sequence[Result],
    targets: Sequence[float],
    metric: str,
    higher_is_better: bool | None = None,
) -> tuple[float, float] | None:
    """The median over runs, each with its own target; None if half of them never reach it."""
    never = (math.inf, math.inf)
    reached = [
        reach(each, target, metric, higher_is_better) or never
        for each, target in zip(results, targets, strict=True)
    ]
    if not reached:
        return None
    epochs, seconds = (statistics.median(values) for values in zip(*reached, strict=True))
    return None if math.isinf(epochs) else (float(epochs), float(seconds))
