"""The t-test, equivalence, sign flips and Holm's correction: by hand, by scipy, by the books."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from statsmodels.stats.multitest import multipletests

from normkit.errors import OptionError
from normkit.lab.statistics import effect, holm, interval, paired_t, sign_flip, tost
from normkit.lab.statistics.family import holm_factors

# additional hours of sleep of ten patients under two drugs (Student 1908), the t-test's own example
SLEEP_1 = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
SLEEP_2 = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]


def test_students_own_data() -> None:
    better, worse = paired_t(SLEEP_2, SLEEP_1)
    assert better == pytest.approx(0.002833 / 2, abs=5e-7)  # two-sided in every textbook
    assert worse == pytest.approx(1 - 0.002833 / 2, abs=5e-7)


@pytest.mark.parametrize("seeds", [2, 5, 15])
def test_as_scipy(seeds: int) -> None:
    a, b = ([random.gauss(0.9, 0.01) for _ in range(seeds)] for _ in range(2))
    better, worse = paired_t(a, b)
    assert better == pytest.approx(stats.ttest_rel(a, b, alternative="greater").pvalue, rel=1e-9)
    assert worse == pytest.approx(stats.ttest_rel(a, b, alternative="less").pvalue, rel=1e-9)


def test_equivalence_is_the_worse_of_two_tests() -> None:
    differences = [0.001, 0.003, -0.002, 0.002, 0.0]
    low = stats.ttest_1samp(differences, -0.005, alternative="greater").pvalue
    high = stats.ttest_1samp(differences, 0.005, alternative="less").pvalue
    assert tost(differences, 0.005) == pytest.approx(max(low, high), rel=1e-9)
    assert low < high  # so that a test that took the first, or the smaller, would not pass


def test_a_margin_of_nothing_is_never_shown() -> None:
    assert tost([0.001, -0.001, 0.0], 0.0) >= 0.5


def test_differences_without_spread_count_signs() -> None:
    # 0.3 − 0.2 is not 0.2 − 0.1 in floating point: t would be 10¹⁶
    a, b = [0.3, 0.2, 0.4, 0.5, 0.9], [0.2, 0.1, 0.3, 0.4, 0.8]
    assert paired_t(a, b) == (1 / 32, 1.0)
    assert paired_t(b, a) == (1.0, 1 / 32)
    assert paired_t(a, a) == (1.0, 1.0)
    assert tost([0.0] * 5, margin=0.005) == 1 / 32
    assert tost([0.01] * 5, margin=0.005) == 1.0
    assert effect([0.01] * 5) == math.inf
    assert effect([0.0] * 5) == 0.0


def test_effect_by_hand() -> None:
    assert effect([1.0, 3.0]) == pytest.approx(2 / math.sqrt(2))
    assert effect([-1.0, -3.0]) == pytest.approx(-2 / math.sqrt(2))


def test_unpaired_scores_are_refused() -> None:
    with pytest.raises(OptionError, match="3 scores cannot be paired with 2"):
        paired_t([1, 2, 3], [1, 2])
    with pytest.raises(OptionError, match=r"1 paired difference.* at least 2"):
        paired_t([1], [2])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("measure", [effect, interval, sign_flip, lambda d: tost(d, 0.1)])
def test_what_is_not_finite_is_refused(
    measure: Callable[[list[float]], object], bad: float
) -> None:
    """The sign-flip test gave p = 0, and the others an AttributeError from the depths."""
    with pytest.raises(OptionError, match=f"{bad} cannot be tested.*diverged"):
        measure([0.1, bad, 0.2])


# heights of 15 pairs of maize plants, cross- minus self-fertilized, in eighths of an inch (Darwin
# 1876). Fisher (The Design of Experiments, section 21) tried all 2¹⁵ signs: 863 sums are as large.
DARWIN = [49, -67, 8, 16, 6, 23, 28, 41, 14, 29, 56, 24, 75, 60, -48]


def test_sign_flips_as_fisher_counted() -> None:
    assert sign_flip(DARWIN) == 2 * 863 / 2**15


def test_sign_flips_as_scipy() -> None:
    differences = [random.gauss(0.5, 1) for _ in range(9)]
    theirs = stats.permutation_test(
        (differences,), lambda x: x.sum(), permutation_type="samples", n_resamples=2**9
    )
    assert sign_flip(differences) == pytest.approx(theirs.pvalue, abs=1e-12)


def test_all_in_one_direction_is_the_smallest() -> None:
    assert sign_flip([0.01, 0.02, 0.03, 0.04, 0.05]) == 2 / 32
    assert sign_flip([0.1] * 5) == 2 / 32  # sums that tie but for rounding
    assert sign_flip([0.0] * 5) == 1.0


def test_sampled_where_there_are_too_many_patterns() -> None:
    differences = [random.gauss(0.3, 1) for _ in range(16)]
    exact = sign_flip(differences)
    # 0 keeps its sign: the same patterns, now sampled. 5 standard errors of 20,000 samples.
    sampled = sign_flip([*differences, 0.0])
    assert sampled != exact
    assert abs(sampled - exact) < 5 * (exact * (1 - exact) / 20_000) ** 0.5 + 1 / 20_001
    assert sampled == sign_flip([*differences, 0.0])
    assert sign_flip([1.0] * 40) == 1 / 20_001


def test_holm_by_hand() -> None:
    # sorted: 0.005·4, 0.01·3, 0.03·2, 0.04·1, none smaller than the one before
    corrected = holm([0.01, 0.04, 0.03, 0.005])
    assert corrected == pytest.approx([0.03, 0.06, 0.06, 0.02])


def test_holm_as_statsmodels() -> None:
    ps = [random.random() ** 4 for _ in range(12)] + [0.01, 0.01, 1.0]
    theirs = multipletests(ps, method="holm")[1]
    assert holm(ps) == pytest.approx(list(theirs), rel=1e-12)


def test_one_comparison_needs_no_correction() -> None:
    assert holm([0.04]) == [0.04]
    assert holm([]) == []


def test_a_comparison_that_could_not_be_made_still_counts() -> None:
    corrected = holm([0.02, math.nan, 0.01])
    assert corrected[::2] == pytest.approx([0.04, 0.03])
    assert math.isnan(corrected[1])


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_a_factor_grants_just_what_holm_shows(ps: list[float]) -> None:
    for p, q, factor in zip(ps, holm(ps), holm_factors(ps), strict=True):
        assert (q <= 0.05) == (factor * p <= 0.05)


def test_factors_by_hand() -> None:
    # 0.001·4, 0.01·3 are shown; 0.04·2 is not, and the other one shares its factor
    assert holm_factors([0.04, 0.001, 0.9, 0.01]) == [2, 4, 2, 3]
    assert holm_factors([0.001, 0.001, math.nan]) == [3, 3, 1]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_between_the_p_value_and_bonferroni_and_in_the_same_order(ps: list[float]) -> None:
    corrected = holm(ps)
    for p, q in zip(ps, corrected, strict=True):
        assert p <= q <= min(1, len(ps) * p)
    by_p = [q for _, q in sorted(zip(ps, corrected, strict=True))]
    assert by_p == sorted(by_p)
