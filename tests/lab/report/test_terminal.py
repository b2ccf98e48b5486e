"""The verdict table in a terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from lab.report import sample
from normkit.lab.report import print_verdicts

MADE = sample.experiment()
FOUND = sample.results(MADE, diverged=[("bn", 3)], left_out=[("ubn", 5)])
COMPARED = sample.comparisons(MADE, FOUND)


def printed(width: int, *given: object) -> str:
    screen = Console(file=io.StringIO(), width=width, color_system=None, highlight=False)
    print_verdicts(*(given or (MADE, FOUND, COMPARED)), screen)
    return screen.file.getvalue()


def test_it_begins_with_the_answer_and_ends_with_cautions() -> None:
    text = printed(140)
    assert text.startswith("bcn is better than bn at 2 samples a worker: +")
    assert "! bn diverged: seed 3" in text
    assert "2 of 50 runs are not finished" in text


@pytest.mark.parametrize("width", [80, 140])
def test_every_row_is_there_at_any_width(width: int) -> None:
    text = printed(width)
    lines = text.splitlines()
    for name in sample.NAMES:
        assert sum(f" {name} " in f" {line} " and "±" in line for line in lines) == 2
    assert max(map(len, lines)) <= width
    assert "…" not in text, "no number is cut off"


def test_p_values_need_room() -> None:
    assert "p (Holm)" in printed(140)
    assert "p (Holm)" not in printed(80)


def test_names_are_no_markup() -> None:
    made = sample.experiment(("bn", "[bold red]x[/]", "[/oops]"))
    found = sample.results(made)
    text = printed(140, made, found, sample.comparisons(made, found))
    assert "[bold red]x[/]" in text
    assert "[/oops]" in text


def test_nothing_run_yet() -> None:
    assert printed(80, MADE, {}, []).strip() == (
        "Nothing has been run yet, so there is no answer yet."
    )
