"""How soon a run is as good as the baseline at its end (UBN, table 8)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from normkit.lab.results import Result, higher_is_better


def reach(result: Result, target: float, metric: str) -> tuple[int, float] | None:
    """The first epoch that is at least as good on the test set, and the seconds until its end.

    None: it never was. Epochs that were not evaluated cannot count.
    """
    for epoch in result.epochs:
        score = epoch.value(metric)
        if score is None or epoch.epoch == 0:
            continue
        if score >= target if higher_is_better(metric) else score <= target:
            return epoch.epoch, epoch.seconds
    return None


def usual_reach(
    results: Sequence[Result], targets: Sequence[float], metric: str
) -> tuple[float, float] | None:
    """The median over runs, each with its own target; None if half of them never reach it."""
    found = [reach(each, target, metric) for each, target in zip(results, targets, strict=True)]
    if not found:
        return None
    never = (math.inf, math.inf)
    epochs = statistics.median(each[0] for each in (one or never for one in found))
    seconds = statistics.median(each[1] for each in (one or never for one in found))
    return None if math.isinf(epochs) else (float(epochs), float(seconds))
