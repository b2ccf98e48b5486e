"""The seeds of an experiment, as a file or a command says them."""

from __future__ import annotations

from typing import Any

from normkit.lab.problems import BadExperiment
from normkit.lab.reading_fields import said

MOST_SEEDS = 10_000  # more are a slip, and would fill the memory


def seeds_of(value: Any) -> tuple[int, ...]:
    """5 means seeds 1 to 5; a list is taken as it is.

    >>> seeds_of(3)
    (1, 2, 3)
    """
    found = range(1, value + 1) if isinstance(value, int) and not isinstance(value, bool) else value
    fits = isinstance(found, range | list | tuple) and 0 < len(found) <= MOST_SEEDS
    if not fits or not all(map(_is_seed, found)) or len(set(found)) < len(found):
        raise BadExperiment(
            f"seeds expects a number from 1 to {MOST_SEEDS:,}, or a list of different numbers, "
            f"got {said(value)}."
        )
    return tuple(found)


def _is_seed(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
