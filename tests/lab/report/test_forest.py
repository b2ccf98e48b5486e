"""The small pictures of the verdict table: one scale for all rows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lab.report import sample
from normkit.lab.report.verdicts import ARROWS, EDGE, WIDTH, forest_row, forest_scale
from normkit.lab.report.words import Metric

MADE = sample.experiment(("bn", "bcn"), {"train.worker_batch": (2,)})
ONE = sample.comparisons(MADE, sample.results(MADE))[0]
ACCURACY = Metric("accuracy")


def test_rows_of_like_size_are_shown_whole() -> None:
    to = forest_scale([(-0.01, 0.02), (0.0, 0.03), (None, float("nan"))])
    assert EDGE < to(-0.01) < to(0.0) < to(0.03) < WIDTH - EDGE


def test_one_row_far_out_does_not_shrink_the_others() -> None:
    """With instance norm at −38 points, all other rows were dots on the zero line."""
    usual = [(-0.01, 0.02)] * 4
    to = forest_scale([*usual, (-0.40, -0.38)])
    assert to(0.02) - to(-0.01) > WIDTH / 6
    far = forest_row(
        replace(ONE, low=-0.40, high=-0.38, difference=-0.39), {1: -0.39}, to, 0.0, ACCURACY
    )
    assert far.beyond == ARROWS[0]
    assert (far.mean, far.dots) == (None, ""), "no stroke at the edge, where it is not"
    near = forest_row(
        replace(ONE, low=-0.01, high=0.02, difference=0.0), {1: 0.0}, to, 0.0, ACCURACY
    )
    assert near.beyond == ""


@pytest.mark.parametrize("rows", [[], [(0.0, 0.0)], [(None,)], [(0.5, 0.7)], [(0.0,), (5.0,)]])
def test_zero_is_always_on_it(rows: list[tuple[float | None, ...]]) -> None:
    to = forest_scale(rows)
    assert EDGE <= to(0.0) <= WIDTH - EDGE
    assert to.low < 0 < to.high
