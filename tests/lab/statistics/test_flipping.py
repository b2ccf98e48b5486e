"""The sign-flip test: Fisher's own example, by counting, and by sampling."""

from __future__ import annotations

import random

import pytest
from scipy import stats

from normkit.lab.statistics import sign_flip

# heights of 15 pairs of maize plants, cross- minus self-fertilized, in eighths of an inch (Darwin
# 1876). Fisher (The Design of Experiments, section 21) tried all 2¹⁵ signs: 863 sums are as large.
DARWIN = [49, -67, 8, 16, 6, 23, 28, 41, 14, 29, 56, 24, 75, 60, -48]


def test_fishers_count() -> None:
    assert sign_flip(DARWIN) == 2 * 863 / 2**15


def test_as_scipy() -> None:
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
