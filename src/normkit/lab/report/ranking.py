"""Verdicts in the order in which a reader wants them."""

from __future__ import annotations

from collections.abc import Sequence

from normkit.lab.report.words import known
from normkit.lab.results import Comparison

ORDER = ("better", "worse", "equivalent", "not shown")
DIVERGED = "diverged"  # shown in place of a verdict where no seed was left to compare


def ranked(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Better first, and within a verdict the largest difference first."""
    worst = float("-inf")
    return sorted(
        comparisons,
        key=lambda c: (
            ORDER.index(c.verdict) if c.verdict in ORDER else len(ORDER),
            -(c.difference if known(c.difference) else worst),
        ),
    )


def shown(c: Comparison) -> str:
    """The verdict, or that there is none because the variant diverged."""
    return DIVERGED if c.diverged and not c.pairs else c.verdict
