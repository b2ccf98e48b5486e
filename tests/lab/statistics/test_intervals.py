"""The interval: against scipy, its symmetries, its coverage; it tells what the test tells."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats

from normkit.lab.statistics import interval, two_sided

differences = st.lists(st.integers(-99, 99).map(lambda k: k / 360), min_size=2, max_size=30)


@pytest.mark.parametrize("seeds", [2, 5, 30])
@pytest.mark.parametrize("alpha", [0.05, 0.05 / 40])
def test_as_scipy(seeds: int, alpha: float) -> None:
    sample = [random.gauss(0.01, 0.02) for _ in range(seeds)]
    theirs = stats.ttest_1samp(sample, 0.0).confidence_interval(1 - alpha)
    assert interval(sample, alpha) == pytest.approx((theirs.low, theirs.high), rel=1e-9)


@given(differences, st.floats(1e-6, 0.05))
def test_it_contains_0_just_where_the_test_shows_nothing(found: list[float], alpha: float) -> None:
    """The verdict was that of a one-sided t-test, the interval a bootstrap: in half of the wrong
    verdicts, "better" stood beside an interval that contained 0."""
    p = two_sided(found)
    assume(abs(p - alpha) > 1e-9)  # where rounding decides, either is right
    low, high = interval(found, alpha)
    assert (low <= 0 <= high) == (p > alpha)


@given(differences)
def test_contains_the_mean_and_turns_around_with_the_sign(found: list[float]) -> None:
    low, high = interval(found)
    assert low <= statistics.fmean(found) + 1e-12
    assert high >= statistics.fmean(found) - 1e-12
    turned = interval([-each for each in found])
    assert turned == pytest.approx((-high, -low), abs=1e-9)


@given(differences, st.floats(-1, 1), st.floats(0.1, 10))
def test_moves_and_stretches_with_the_data(found: list[float], by: float, times: float) -> None:
    assume(statistics.stdev(found) > 0)
    low, high = interval(found)
    moved = interval([by + times * each for each in found])
    assert moved == pytest.approx((by + times * low, by + times * high), abs=1e-8)


def test_without_spread_signs_decide() -> None:
    assert interval([0.25] * 6) == (0.25, 0.25)  # 2·2⁻⁶ < 5 %
    assert interval([0.25] * 5) == (-math.inf, math.inf)


def _normal(chance: random.Random) -> float:
    return chance.gauss(0, 1)


def _accuracies(chance: random.Random) -> float:
    """Of two networks that are as good, on 360 images: a coarse grid of values, many of them 0."""
    return float(sum(chance.choices((-1, 0, 1), (0.0291, 0.9418, 0.0291), k=360))) / 360


@pytest.mark.parametrize(
    ("seeds", "draw"),
    [(3, _normal), (5, _normal), (15, _normal), (5, _accuracies)],
    ids=["3-normal", "5-normal", "15-normal", "5-accuracies"],
)
def test_it_covers_95_percent(seeds: int, draw: Callable[[random.Random], float]) -> None:
    """95 ± 1.5 %; of 5,000 experiments the share is known to ±0.3 % (one standard error)."""
    chance = random.Random(seeds)
    covered = 0
    for _ in range(5000):
        low, high = interval([draw(chance) for _ in range(seeds)])
        covered += low <= 0 <= high
    assert 0.935 <= covered / 5000 <= 0.965
