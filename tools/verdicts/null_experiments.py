"""Experiments in which nothing differs: how often the lab's own procedure says that it does.

All variants are drawn from one distribution, with a luck of each seed that they share. The
verdicts are those of ``normkit.lab.statistics.decide``, the function that reports are made with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from normkit.lab.statistics import decide

Array = NDArray[np.float64]
SEEDS, VARIANTS = (3, 5, 15), (1, 3, 8)
NOISE, LUCK, COLLAPSED, MARGIN = 0.005, 0.005, 0.05, 0.005
Draw = Callable[[np.random.Generator, tuple[int, ...]], Array]


def _collapsing(generator: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """NaN is a run that was lost."""
    noise = generator.normal(0, NOISE, shape)
    return np.where(generator.random(shape) < COLLAPSED, np.nan, noise)


DRAWS: dict[str, Draw] = {
    "normal": lambda generator, shape: generator.normal(0, NOISE, shape),
    "heavy tails (t, 3 degrees)": lambda generator, shape: NOISE * generator.standard_t(3, shape),
    "5 % collapsed": _collapsing,
}


@dataclass
class Rates:
    """Counts over the experiments of one cell of the table."""

    experiments: int = 0
    wrong: int = 0  # experiments with a "better" or "worse" anywhere
    unstable: int = 0  # experiments with an "unstable" anywhere
    intervals: int = 0
    covering: int = 0  # intervals that contain the true difference, 0
    together: int = 0  # experiments in which all of them do


def simulate(draw: Draw, seeds: int, variants: int, experiments: int, start: int = 0) -> Rates:
    generator = np.random.default_rng([start, seeds, variants])
    rates = Rates(experiments)
    for _ in range(experiments):
        luck = generator.normal(0, LUCK, (seeds, 1))
        scores = luck + draw(generator, (seeds, 1 + variants))
        family, stable = [], []
        for column in range(1, 1 + variants):
            differences = scores[:, column] - scores[:, 0]
            kept = differences[~np.isnan(differences)]
            family.append(kept.tolist())
            stable.append(len(kept) == seeds)
        decisions = decide(family, MARGIN, stable=stable)
        rates.wrong += any(each.verdict in ("better", "worse") for each in decisions)
        rates.unstable += not all(stable)
        ends = [(each.low, each.high) for each in decisions if each.low == each.low]
        covered = [low <= 0 <= high for low, high in ends]
        rates.intervals += len(covered)
        rates.covering += sum(covered)
        rates.together += all(covered)
    return rates


def null_rows(experiments: int) -> list[tuple[str, ...]]:
    """Percentages, a row for each cell."""
    rows: list[tuple[str, ...]] = []
    for place, (name, draw) in enumerate(DRAWS.items()):
        for seeds in SEEDS:
            for variants in VARIANTS:
                rates = simulate(draw, seeds, variants, experiments, place)
                first = seeds == SEEDS[0] and variants == VARIANTS[0]
                rows.append(
                    (
                        name if first else "",
                        str(seeds),
                        str(variants),
                        f"{100 * rates.wrong / rates.experiments:.1f}",
                        f"{100 * rates.unstable / rates.experiments:.1f}",
                        f"{100 * rates.covering / rates.intervals:.1f}",
                        f"{100 * rates.together / rates.experiments:.1f}",
                    )
                )
    return rows
