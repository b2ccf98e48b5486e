"""Costs, and published numbers beside ours: decided by our verdict, not by a sign."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lab.report import sample
from normkit.lab.report.differences import setting_words
from normkit.lab.report.scores import Scoreboard
from normkit.lab.report.tables import (
    NOT_REACHED,
    REACHED,
    CostRow,
    agreement,
    cost_heads,
    cost_rows,
    published_rows,
)
from normkit.lab.results import Comparison

MADE = sample.experiment(("bn", "ubn"), {"train.worker_batch": (2,)}, epochs=10)
FOUND = sample.results(MADE)


def rows(**more: float | int | None) -> dict[str, CostRow]:
    board = Scoreboard(MADE, FOUND)
    compared: list[Comparison] = [replace(c, **more) for c in sample.comparisons(MADE, FOUND)]
    found = cost_rows(board, compared)
    return {row.style.name: row for row in found}


def reached(row: CostRow) -> list[tuple[str, str]]:
    return [(amount.text, amount.ratio) for amount in row.amounts[-len(REACHED) :]]


def test_the_baseline_has_its_own_end_to_compare_with() -> None:
    """The others' epochs stood beside a dash: half of how many?"""
    found = rows(epochs_to_baseline=5.0, seconds_to_baseline=1.0)
    assert reached(found["bn"]) == [("10", ""), ("2 s", "")]  # 0.2 s an epoch in the sample
    assert reached(found["ubn"]) == [("5", "× 0.50"), ("1 s", "× 0.50")]


def test_never_is_an_answer() -> None:
    """Where nobody reached it, the columns were not there."""
    found = rows(epochs_to_baseline=None, seconds_to_baseline=None)
    assert reached(found["ubn"]) == [(NOT_REACHED, ""), (NOT_REACHED, "")]
    assert [name for _, name in cost_heads(list(found.values()))][-2:] == list(REACHED)


def test_without_a_pair_nothing_is_said() -> None:
    found = rows(pairs=0, epochs_to_baseline=None, seconds_to_baseline=None)
    assert reached(found["ubn"]) == [("–", ""), ("–", "")]


def test_the_end_is_the_epoch_that_counts() -> None:
    early = {run: replace(each, selected=(3, 4)) for run, each in FOUND.items()}
    board = Scoreboard(MADE, early)
    base = cost_rows(board, [])[0]
    assert reached(base)[0] == ("4", "")


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


def test_settings_in_another_order_of_keys_are_the_same() -> None:
    """A store sorts its keys: data.augment of a file was listed as different from its own run."""
    first, second = (
        setting_words({"data": {"augment": [step]}})
        for step in ({"use": "RandomCrop", "size": 8}, {"size": 8, "use": "RandomCrop"})
    )
    assert first == second
