"""Which results belong together: a variant's and the baseline's, of the same cell and seed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from normkit.errors import OptionError
from normkit.lab.experiment import Experiment, Variant
from normkit.lab.results import Result


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


def baseline_of(experiment: Experiment, variant: Variant) -> Variant:
    try:
        return experiment.variant(experiment.baseline, variant.cell)
    except KeyError:
        raise OptionError(
            f"{variant.name!r} has nothing to be compared with: the baseline "
            f"{experiment.baseline!r} is not in the cell {dict(variant.cell)}. "
            "Try to let the baseline be in every cell."
        ) from None


def pairs(
    experiment: Experiment, variant: Variant, baseline: Variant, results: Mapping[str, Result]
) -> Pairs:
    ours, scores, theirs = [], [], []
    diverged = baseline_diverged = 0
    for run, base in zip(
        variant.runs(experiment.seeds), baseline.runs(experiment.seeds), strict=True
    ):
        result, other = results.get(run.id), results.get(base.id)
        score, target = _score(result, experiment.metric), _score(other, experiment.metric)
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


def _score(result: Result | None, metric: str) -> float | None:
    """None for a run that is not finished or that diverged; an infinite loss is a divergence."""
    score = result.score(metric) if result else None
    return score if score is not None and math.isfinite(score) else None
