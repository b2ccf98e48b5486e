"""From the results of an experiment to what they show."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from normkit.errors import OptionError
from normkit.lab.experiment import Experiment, Variant
from normkit.lab.results import Comparison, Result, higher_is_better
from normkit.lab.statistics.paired import (
    ALPHA,
    NOT_SHOWN,
    effect,
    holm,
    holm_factors,
    interval,
    more_seeds,
    paired_t,
    sign_flip,
    tost,
    verdict,
)


@dataclass(frozen=True)
class Pairs:
    """What two variants did with the seeds that both finished; divergences are only counted."""

    variant: Variant
    results: tuple[Result, ...]
    scores: tuple[float, ...]
    baseline_scores: tuple[float, ...]
    better: tuple[float, ...]  # differences, positive where the variant is better
    diverged: int
    baseline_diverged: int


def compare(experiment: Experiment, results: Mapping[str, Result]) -> list[Comparison]:
    """Every variant against the baseline in every cell, by the results there are (id -> Result).

    Only seeds that both have finished are compared. Runs that diverged are counted and stay out
    of means and tests: a verdict is about the runs that trained. "better" and "worse" are the
    paper's one-sided test at 5 %, each corrected by Holm for all comparisons that the experiment
    asks for, finished or not; so is "equivalent".

    With fewer than 2 pairs the verdict is "not shown" and whatever they cannot tell is NaN: every
    test, the interval, the effect, the spread, and without any pair the means too.
    """
    compared = [
        _pairs(experiment, variant, results)
        for variant in experiment.variants
        if variant.name != experiment.baseline
    ]
    tests = [_p_values(pairs, experiment.equivalence) for pairs in compared]
    by_test = [list(ps) for ps in zip(*tests, strict=True)] or [[], [], []]
    corrected = zip(*map(holm, by_test), strict=True)
    factors = zip(*map(holm_factors, by_test), strict=True)
    return [
        _comparison(experiment, *each)
        for each in zip(compared, tests, corrected, factors, strict=True)
    ]


def _pairs(experiment: Experiment, variant: Variant, results: Mapping[str, Result]) -> Pairs:
    """The results that belong together: of the same cell and seed."""
    try:
        baseline = experiment.variant(experiment.baseline, variant.cell)
    except KeyError:
        raise OptionError(
            f"{variant.name!r} has nothing to be compared with: the baseline "
            f"{experiment.baseline!r} is not in the cell {dict(variant.cell)}. "
            "Try to let the baseline be in every cell."
        ) from None

    def score_of(result: Result | None) -> float | None:
        """None for a run that is not finished or that diverged; an infinite loss diverged, too."""
        score = result.score(experiment.metric) if result else None
        return score if score is not None and math.isfinite(score) else None

    ours, scores, theirs = [], [], []
    diverged = baseline_diverged = 0
    for run, base in zip(
        variant.runs(experiment.seeds), baseline.runs(experiment.seeds), strict=True
    ):
        result, other = results.get(run.id), results.get(base.id)
        score, target = score_of(result), score_of(other)
        diverged += result is not None and score is None
        baseline_diverged += other is not None and target is None
        if result is not None and score is not None and target is not None:
            ours.append(result)
            scores.append(score)
            theirs.append(target)
    sign = 1 if experiment.higher_is_better else -1
    better = tuple(sign * (a - b) for a, b in zip(scores, theirs, strict=True))
    return Pairs(
        variant, tuple(ours), tuple(scores), tuple(theirs), better, diverged, baseline_diverged
    )


def _p_values(pairs: Pairs, margin: float) -> tuple[float, float, float]:
    """Of better, worse and equivalent."""
    if len(pairs.better) < 2:
        return (math.nan, math.nan, math.nan)
    zeros = [0.0] * len(pairs.better)
    return (*paired_t(pairs.better, zeros), tost(pairs.better, margin))


def _comparison(
    experiment: Experiment,
    pairs: Pairs,
    tests: Sequence[float],
    corrected: Sequence[float],
    factors: Sequence[int],
) -> Comparison:
    better = pairs.better
    word = verdict(*corrected)
    more = None
    if word == NOT_SHOWN:
        # the level at which Holm would accept the test that is nearest to it
        direction = 0 if better and statistics.fmean(better) >= 0 else 1
        more = more_seeds(
            better,
            experiment.equivalence,
            alpha=ALPHA / factors[direction],
            alpha_equivalent=ALPHA / factors[2],
        )
    reached = median_reach(pairs.results, pairs.baseline_scores, experiment.metric)
    several = len(better) > 1
    low, high = interval(better) if several else (math.nan, math.nan)
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
        low=low,
        high=high,
        effect=effect(better) if several else math.nan,
        p_better=tests[0],
        p_worse=tests[1],
        p_better_holm=corrected[0],
        p_worse_holm=corrected[1],
        p_sign_flip=sign_flip(better) if several else math.nan,
        p_equivalent=tests[2],
        p_equivalent_holm=corrected[2],
        verdict=word,
        more_seeds=more,
        diverged=pairs.diverged,
        baseline_diverged=pairs.baseline_diverged,
        epochs_to_baseline=reached[0] if reached else None,
        seconds_to_baseline=reached[1] if reached else None,
    )


def _mean(scores: Sequence[float]) -> float:
    return statistics.fmean(scores) if scores else math.nan


def _std(scores: Sequence[float]) -> float:
    return statistics.stdev(scores) if len(scores) > 1 else math.nan


def reach(result: Result, target: float, metric: str) -> tuple[int, float] | None:
    """The first epoch as good as a target on the test set, and the seconds until its end (UBN).

    None: it never was. Epochs that were not evaluated cannot count.
    """
    for epoch in result.epochs:
        score = epoch.value(metric)
        if score is None or epoch.epoch == 0:
            continue
        if score >= target if higher_is_better(metric) else score <= target:
            return epoch.epoch, epoch.seconds
    return None


def median_reach(
    results: Sequence[Result], targets: Sequence[float], metric: str
) -> tuple[float, float] | None:
    """The median over runs, each with its own target; None if half of them never reach it."""
    never = (math.inf, math.inf)
    reached = [
        reach(each, target, metric) or never for each, target in zip(results, targets, strict=True)
    ]
    if not reached:
        return None
    epochs, seconds = (statistics.median(values) for values in zip(*reached, strict=True))
    return None if math.isinf(epochs) else (float(epochs), float(seconds))
