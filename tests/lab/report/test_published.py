"""Whether ours agrees with what was published: decided by our verdict, not by a sign."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lab.report import sample
from normkit.lab.report.scores import Scoreboard
from normkit.lab.report.tables import agreement, published_rows


@pytest.mark.parametrize(
    ("theirs", "verdict", "agrees"),
    [
        (0.02, "better", "yes"),
        (-0.02, "better", "no"),
        (-0.02, "worse", "yes"),
        (0.0, "worse", "no"),
        (0.004, "equivalent", "yes"),
        (0.02, "equivalent", "no"),
        (0.02, "not shown", "not shown"),
        (-0.02, "not shown", "not shown"),
        (0.02, "diverged", "diverged"),
        (None, "better", ""),
    ],
)
def test_agreement(theirs: float | None, verdict: str, agrees: str) -> None:
    """A difference within noise was called a contradiction, in red."""
    assert agreement(theirs, verdict, 0.005) == agrees


def test_a_row_has_the_verdict_of_its_cell() -> None:
    made = sample.published(sample.experiment(("bn", "gn", "bgn")))
    found = sample.results(made)
    board = Scoreboard(made, found)
    first = made.cells()[0]
    compared = [
        replace(c, verdict="worse" if (c.variant, c.cell) == ("gn", first) else "better")
        for c in sample.comparisons(made, found)
    ]
    rows = published_rows(board, compared)
    said = {(row.style.name, row.published.cell == first): row.agree for row in rows}
    assert said["gn", True] == "no"
    assert said["gn", False] == said["bgn", True] == "yes"
    assert said["bn", True] == ""
