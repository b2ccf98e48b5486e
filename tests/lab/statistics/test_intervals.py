"""The interval: its parts against enumeration and scipy, its symmetries, its coverage."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Callable

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats

from normkit.lab.statistics import interval
from normkit.lab.statistics.paired import _resampled_mean, bca

FIVE = [-1.2, -0.4, 0.1, 0.3, 1.2]


@pytest.mark.parametrize("z", [-3.0, -1.5, 1.5, 3.0])
def test_tails_against_every_resample(z: float) -> None:
    """Of all 5⁵ resamples, each with normal noise, the share Φ(z) is below the value."""
    noise = 1 / 25
    value = _resampled_mean(FIVE, z, noise)
    means = [statistics.fmean(each) for each in itertools.product(FIVE, repeat=5)]
    share = statistics.fmean(float(stats.norm.cdf((value - m) / noise**0.5)) for m in means)
    wanted = float(stats.norm.cdf(z))
    tail, wanted = (share, wanted) if z < 0 else (1 - share, 1 - wanted)
    # the saddlepoint formula errs by a share of the tail that shrinks as n^(−3/2)
    assert abs(tail / wanted - 1) < 5**-1.5


def test_with_many_numbers_it_is_the_textbooks_bca() -> None:
    sample = [random.gammavariate(2, 1) for _ in range(60)]
    mean, std = statistics.fmean(sample), statistics.stdev(sample)
    low, high = bca([(each - mean) / std for each in sample], 1.959964, noise=0.0)
    resamples = 20_000
    theirs = stats.bootstrap(
        (sample,), statistics.fmean, method="BCa", n_resamples=resamples, vectorized=False, rng=1
    )
    # 5 standard errors of a 2.5 % quantile that was sampled: √(p(1−p)/R) over the density there
    allowed = 5 * math.sqrt(0.025 * 0.975 / resamples) / stats.norm.pdf(1.96) * std / 60**0.5
    assert abs(mean + std * low - theirs.confidence_interval.low) < allowed
    assert abs(mean + std * high - theirs.confidence_interval.high) < allowed
    assert high > -low  # it leans towards the longer tail


differences = st.lists(st.integers(-99, 99).map(lambda k: k / 360), min_size=2, max_size=30)


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


def test_no_spread_no_width() -> None:
    assert interval([0.25] * 4) == (0.25, 0.25)


def _normal(chance: random.Random) -> float:
    return chance.gauss(0, 1)


def _accuracies(chance: random.Random) -> float:
    """Of two networks that are as good, on 360 images: a coarse grid of values, many of them 0."""
    return float(sum(chance.choices((-1, 0, 1), (0.0291, 0.9418, 0.0291), k=360))) / 360


@pytest.mark.parametrize(
    ("seeds", "draw"),
    [(5, _normal), (9, _normal), (15, _normal), (5, _accuracies)],
    ids=["5-normal", "9-normal", "15-normal", "5-accuracies"],
)
def test_it_covers_95_percent(seeds: int, draw: Callable[[random.Random], float]) -> None:
    """95 ± 1.5 %; of 5,000 experiments the share is known to ±0.3 % (one standard error)."""
    chance = random.Random(seeds)
    covered = 0
    for _ in range(5000):
        low, high = interval([draw(chance) for _ in range(seeds)])
        covered += low <= 0 <= high
    assert 0.935 <= covered / 5000 <= 0.965
