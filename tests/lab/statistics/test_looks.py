"""Planned looks keep 5 %; without a correction each comparison has its own."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from scipy import special, stats

from lab.statistics.made_up import experiment, results
from normkit.lab.statistics import PlannedLooks, compare, decide, interval

BN = [0.90, 0.91, 0.92, 0.90, 0.91, 0.90]
GROWTH = [0.02, 0.03, 0.02, 0.03, 0.02, 0.03]


@pytest.mark.parametrize("looks", [(3, 6), (5, 10, 20), (3, 6, 9, 12, 15)])
def test_all_looks_together_err_in_5_percent(looks: tuple[int, ...]) -> None:
    """Testing at 5 % after each of five looks errs in 13 %."""
    counts = np.array(looks)
    draws = np.random.default_rng(1).standard_normal((40_000, looks[-1]))
    sums, squares = (each.cumsum(1)[:, counts - 1] for each in (draws, draws**2))
    t = sums / np.sqrt(counts * (squares - sums**2 / counts) / (counts - 1))
    smallest = (2 * special.stdtr(counts - 1, -np.abs(t))).min(1)
    assert (smallest <= 0.05).mean() > 0.075
    for alpha in (0.05, 0.05 / 8):
        wrong = int((smallest <= PlannedLooks(looks).nominal(alpha)).sum())
        low, high = stats.binom.interval(0.999, 40_000, alpha)
        assert 0.97 * low < wrong < 1.03 * high  # 1 to 2 %: the level is simulated, too


def test_as_pocock_where_seeds_are_many() -> None:
    # two-sided 5 %, two equally spaced looks at normal variables: 0.0294 (Pocock 1977)
    assert PlannedLooks((40, 80)).nominal() == pytest.approx(0.0294, rel=0.03)


def test_levels_and_probabilities_are_inverse_and_bounded() -> None:
    looks = PlannedLooks((5, 10, 20))
    for alpha in (0.05, 0.01, 1e-3, 1e-5, 1e-9):
        level = looks.nominal(alpha)
        assert alpha / 3 <= level < alpha
        assert looks.overall(level) == pytest.approx(alpha, rel=1e-3)
    assert PlannedLooks((5,)).nominal(0.05) == pytest.approx(0.05)
    assert math.isnan(looks.overall(math.nan))
    assert looks.overall(0.0) == 0.0


def test_a_verdict_is_that_of_the_last_complete_look() -> None:
    better = [each + d for each, d in zip(BN, GROWTH, strict=True)]
    about = experiment("bn", "bcn", seeds=6, looks=(3, 6))

    def found(seeds: int) -> object:
        return compare(about, results(about, {"bn": BN, "bcn": better[:seeds]}))[0]

    assert (found(2).pairs, found(2).verdict) == (0, "not shown")  # type: ignore[attr-defined]
    assert found(3) == found(5)
    assert (found(5).pairs, found(6).pairs) == (3, 6)  # type: ignore[attr-defined]
    (plain,) = compare(experiment("bn", "bcn", seeds=6), results(about, {"bn": BN, "bcn": better}))
    looked = found(6)
    assert looked.low < plain.low < plain.high < looked.high  # type: ignore[attr-defined]
    assert looked.alpha == PlannedLooks((3, 6)).nominal()  # type: ignore[attr-defined]


def test_interval_and_corrected_p_value_agree_at_every_look() -> None:
    chance = random.Random(4)
    for _ in range(100):
        family = [[chance.gauss(0.4, 1) for _ in range(6)] for _ in range(3)]
        for each in decide(family, 0.9, looks=(3, 6, 9)):
            assert (each.p_difference_holm <= 0.05) == (each.low > 0 or each.high < 0)
            within = each.low > -0.9 and each.high < 0.9
            assert (each.p_equivalent_holm <= 0.05) == within


def test_without_a_correction() -> None:
    about = experiment("bn", "a", "b", seeds=6, multiplicity="none")
    better = [each + d for each, d in zip(BN, GROWTH, strict=True)]
    for each in compare(about, results(about, {"bn": BN, "a": better, "b": BN})):
        assert each.alpha == 0.05
        assert each.p_difference_holm == each.p_difference
    differences = [a - b for a, b in zip(better, BN, strict=True)]
    first = compare(about, results(about, {"bn": BN, "a": better, "b": BN}))[0]
    assert (first.low, first.high) == interval(differences)
