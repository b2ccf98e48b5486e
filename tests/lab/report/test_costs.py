"""Time, and how soon a variant is as good as the baseline in the end (UBN, table 8)."""

from __future__ import annotations

from dataclasses import replace

from lab.report import sample
from normkit.lab.report.figures import looks
from normkit.lab.report.scores import Board
from normkit.lab.report.tables import NEVER, REACHED, Cost, costs, heads
from normkit.lab.results import Comparison

MADE = sample.experiment(("bn", "ubn"), {"train.worker_batch": (2,)}, epochs=10)
FOUND = sample.results(MADE)


def rows(**more: float | int | None) -> dict[str, Cost]:
    board = Board(MADE, FOUND)
    compared: list[Comparison] = [replace(c, **more) for c in sample.comparisons(MADE, FOUND)]
    found = costs(board, compared, looks(board.names()))
    return {row.look.name: row for row in found}


def reached(row: Cost) -> list[tuple[str, str]]:
    return [(amount.text, amount.ratio) for amount in row.amounts[-len(REACHED) :]]


def test_the_baseline_has_its_own_end_to_compare_with() -> None:
    """The others' epochs stood beside a dash: half of how many?"""
    found = rows(epochs_to_baseline=5.0, seconds_to_baseline=1.0)
    assert reached(found["bn"]) == [("10", ""), ("2 s", "")]  # 0.2 s an epoch in the sample
    assert reached(found["ubn"]) == [("5", "× 0.50"), ("1 s", "× 0.50")]


def test_never_is_an_answer() -> None:
    """Where nobody reached it, the columns were not there."""
    found = rows(epochs_to_baseline=None, seconds_to_baseline=None)
    assert reached(found["ubn"]) == [(NEVER, ""), (NEVER, "")]
    assert [name for _, name in heads(list(found.values()))][-2:] == list(REACHED)


def test_without_a_pair_nothing_is_said() -> None:
    found = rows(pairs=0, epochs_to_baseline=None, seconds_to_baseline=None)
    assert reached(found["ubn"]) == [("–", ""), ("–", "")]


def test_the_end_is_the_epoch_that_counts() -> None:
    early = {run: replace(each, selected=(3, 4)) for run, each in FOUND.items()}
    board = Board(MADE, early)
    base = costs(board, [], looks(board.names()))[0]
    assert reached(base)[0] == ("4", "")
