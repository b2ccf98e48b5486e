"""Holm's correction by hand, and what it promises."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from normkit.lab.statistics import holm


def test_by_hand() -> None:
    # sorted: 0.005·4, 0.01·3, 0.03·2, 0.04·1, none smaller than the one before
    corrected = holm([0.01, 0.04, 0.03, 0.005])
    assert corrected == pytest.approx([0.03, 0.06, 0.06, 0.02])


def test_one_comparison_needs_no_correction() -> None:
    assert holm([0.04]) == [0.04]
    assert holm([]) == []


def test_a_comparison_that_could_not_be_made_still_counts() -> None:
    corrected = holm([0.02, math.nan, 0.01])
    assert corrected[::2] == pytest.approx([0.04, 0.03])
    assert math.isnan(corrected[1])


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_between_the_p_value_and_bonferroni_and_in_the_same_order(ps: list[float]) -> None:
    corrected = holm(ps)
    for p, q in zip(ps, corrected, strict=True):
        assert p <= q <= min(1, len(ps) * p)
    by_p = [q for _, q in sorted(zip(ps, corrected, strict=True))]
    assert by_p == sorted(by_p)
