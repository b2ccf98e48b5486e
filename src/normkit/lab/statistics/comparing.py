"""From the results of an experiment to what they show."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from normkit.lab.experiment import Experiment
from normkit.lab.results import Comparison, Result
from normkit.lab.statistics.correction import factors, holm
from normkit.lab.statistics.flipping import sign_flip
from normkit.lab.statistics.intervals import interval
from normkit.lab.statistics.pairing import Pairs, baseline_of, pairs
from normkit.lab.statistics.power import more_seeds
from normkit.lab.statistics.reaching import usual_reach
from normkit.lab.statistics.spread import ALPHA, effect
from normkit.lab.statistics.t_tests import paired_t, tost
from normkit.lab.statistics.verdicts import NOT_SHOWN, verdict


def compare(experiment: Experiment, results: Mapping[str, Result]) -> list[Comparison]:
    """Every variant against the baseline in every cell, by the results there are (id -> Result).

    Only seeds that both have finished are compared. Runs that diverged are counted and stay out
    of means and tests: a verdict is about the runs that trained. "better" and "worse" are the
    paper's one-sided test at 5 %, each corrected by Holm for all comparisons that the experiment
    asks for, finished or not; so is "equivalent".

    With fewer than 2 pairs the verdict is "not shown" and whatever they cannot tell is NaN: every
    test, the interval, the effect, the spread, and without any pair the means too.
    """
    found = [
        pairs(experiment, variant, baseline_of(experiment, variant), results)
        for variant in experiment.variants
        if variant.name != experiment.baseline
    ]
    tests = [_tests(each, experiment.equivalence) for each in found]
    by_test = [list(ps) for ps in zip(*tests, strict=True)] or [[], [], []]
    corrected = list(zip(*map(holm, by_test), strict=True))
    by_how_much = list(zip(*map(factors, by_test), strict=True))
    return [
        _comparison(experiment, *each)
        for each in zip(found, tests, corrected, by_how_much, strict=True)
    ]


def _tests(found: Pairs, margin: float) -> tuple[float, float, float]:
    """p-values of better, worse and equivalent."""
    if len(found.better) < 2:
        return (math.nan, math.nan, math.nan)
    nothing = [0.0] * len(found.better)
    return (*paired_t(found.better, nothing), tost(found.better, margin))


def _comparison(
    experiment: Experiment,
    found: Pairs,
    tests: Sequence[float],
    corrected: Sequence[float],
    factors: Sequence[int],
) -> Comparison:
    better = found.better
    word = verdict(*corrected)
    # the level at which Holm would accept the test that is nearest to it
    direction = 0 if better and statistics.fmean(better) >= 0 else 1
    open_question = word == NOT_SHOWN
    reached = usual_reach(found.results, found.baseline_scores, experiment.metric)
    low, high = interval(better) if len(better) > 1 else (math.nan, math.nan)
    return Comparison(
        variant=found.variant.name,
        baseline=experiment.baseline,
        cell=found.variant.cell,
        pairs=len(better),
        mean=_mean(found.scores),
        std=_std(found.scores),
        baseline_mean=_mean(found.baseline_scores),
        baseline_std=_std(found.baseline_scores),
        difference=_mean(better),
        low=low,
        high=high,
        effect=effect(better) if len(better) > 1 else math.nan,
        p_better=tests[0],
        p_worse=tests[1],
        p_better_holm=corrected[0],
        p_worse_holm=corrected[1],
        p_sign_flip=sign_flip(better) if len(better) > 1 else math.nan,
        p_equivalent=tests[2],
        p_equivalent_holm=corrected[2],
        verdict=word,
        more_seeds=more_seeds(
            better,
            experiment.equivalence,
            alpha=ALPHA / factors[direction],
            alpha_equivalent=ALPHA / factors[2],
        )
        if open_question
        else None,
        diverged=found.diverged,
        baseline_diverged=found.baseline_diverged,
        epochs_to_baseline=reached[0] if reached else None,
        seconds_to_baseline=reached[1] if reached else None,
    )


def _mean(scores: Sequence[float]) -> float:
    return statistics.fmean(scores) if scores else math.nan


def _std(scores: Sequence[float]) -> float:
    return statistics.stdev(scores) if len(scores) > 1 else math.nan
