"""The answer in sentences: the first thing a reader sees has to be right."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lab.report import sample
from normkit.lab.report.answer import Answer, answer
from normkit.lab.report.cautions import cautions
from normkit.lab.report.scores import Board
from normkit.lab.results import Comparison

ONE = sample.experiment(("bn", "bcn"), {"train.worker_batch": (2,)})
FOUND = sample.results(ONE)
CELL = ONE.cells()[0]


def comparison(**more: Any) -> Comparison:
    made = sample.comparisons(ONE, FOUND)[0]
    given = {"difference": 0.031, "low": 0.022, "high": 0.040, "pairs": 5, "verdict": "better"}
    return replace(made, **{**given, **more})


def said(*found: Comparison) -> Answer:
    return answer(Board(ONE, FOUND), found)


def test_a_better_variant() -> None:
    assert said(comparison()).lead == (
        "bcn is better than bn at 2 samples a worker: +3.1 points, 95 % interval 2.2 to 4.0, "
        "5 seeds."
    )
    assert said(comparison()).tone == "better"


def test_a_worse_one() -> None:
    worse = comparison(verdict="worse", difference=-0.02, low=-0.03, high=-0.01)
    assert said(worse).lead.startswith("bcn is worse than bn at 2 samples a worker: −2.0 points")


def test_an_equivalent_one_says_within_what() -> None:
    same = comparison(verdict="equivalent", difference=0.0001, low=-0.001, high=0.0012)
    assert "bcn is equivalent to bn, within 0.5 points" in said(same).lead


def test_not_shown_says_how_many_seeds_would_decide() -> None:
    open_question = comparison(verdict="not shown", more_seeds=12)
    assert said(open_question).lead.endswith("5 seeds; about 12 more seeds would decide.")
    unknown = comparison(verdict="not shown", more_seeds=None)
    assert "decide" not in said(unknown).lead


def test_without_a_pair_nothing_is_claimed() -> None:
    nothing = comparison(verdict="not shown", pairs=0, difference=float("nan"), low=float("nan"))
    assert said(nothing).lead == (
        "bcn cannot be compared with bn at 2 samples a worker: no seed was finished by both."
    )


def test_divergences_are_part_of_the_sentence() -> None:
    assert said(comparison(diverged=2)).lead.endswith("5 seeds; it diverged at 2 of 5 seeds.")


def test_the_lead_is_the_largest_improvement() -> None:
    made = sample.experiment()
    found = sample.results(made)
    whole = answer(Board(made, found), sample.comparisons(made, found))
    assert whole.lead.startswith("bcn is better than bn at 2 samples a worker: +")
    assert [title for title, _ in whole.groups] == [
        "At 2 samples a worker",
        "At 64 samples a worker",
    ]
    assert [line.name for line in whole.groups[0][1]][:2] == ["bcn", "gn"]
    assert whole.groups[1][1][0].verdict in ("better", "worse", "equivalent")


@pytest.mark.parametrize(
    ("verdicts", "lead"),
    [
        (("worse", "worse"), "Everything compared is worse than bn."),
        (("equivalent", "equivalent"), "Everything compared is equivalent to bn."),
        (("worse", "not shown"), "Nothing was shown to be better than bn."),
    ],
)
def test_leads_where_nothing_is_better(verdicts: tuple[str, str], lead: str) -> None:
    assert said(*(comparison(verdict=each) for each in verdicts)).lead == lead


def test_many_cells_are_counted() -> None:
    made = sample.experiment(("bn", "bcn", "gn"), {"train.worker_batch": (2, 4, 8, 16, 64)})
    found = sample.results(made)
    compared = [
        replace(c, verdict="better" if c.variant == "gn" else "worse")
        for c in sample.comparisons(made, found)
    ]
    whole = answer(Board(made, found), compared)
    assert whole.groups == ()
    assert [(tally.name, dict(tally.counts)) for tally in whole.tallies] == [
        ("gn", {"better": 5, "worse": 0, "equivalent": 0, "not shown": 0}),
        ("bcn", {"better": 0, "worse": 5, "equivalent": 0, "not shown": 0}),
    ]
    assert "gn: better in 5 of 5 cells" in whole.text()


def test_error_that_falls_is_better() -> None:
    made = sample.experiment(("bn", "bcn"), {"train.worker_batch": (2,)}, metric="error")
    found = sample.results(made)
    lead = answer(Board(made, found), sample.comparisons(made, found)).lead
    assert lead.startswith("bcn is better than bn at 2 samples a worker: error ")
    assert "points lower" in lead


def test_nothing_run_yet() -> None:
    whole = answer(Board(ONE, {}), sample.comparisons(ONE, {}))
    assert whole.lead == "Nothing has been run yet, so there is no answer yet."
    assert cautions(Board(ONE, {})) == []


def test_cautions_name_what_weakens_the_answer() -> None:
    made = sample.experiment(("bn", "bcn"), {"train.worker_batch": (2,)}, seeds=3)
    found = sample.results(made, diverged=[("bcn", 2)], left_out=[("bn", 3)])
    other = next(iter(found))
    found[other] = replace(found[other], environment={"torch": "2.10.0"})
    text = " ".join(cautions(Board(made, found)))
    assert "1 of 6 runs are not finished" in text
    assert "bcn diverged: seed 2 at 2 samples a worker." in text
    assert "3 seeds: too few" in text
    assert "not all made with the same versions" in text


def test_ways_of_computing_are_no_other_environment() -> None:
    found = {
        run: replace(result, environment={**result.environment, "side by side": str(k % 3)})
        for k, (run, result) in enumerate(FOUND.items())
    }
    assert cautions(Board(ONE, found)) == []


def test_a_narrow_verdict_is_said_to_be_one() -> None:
    compared = sample.comparisons(ONE, FOUND)
    board = Board(ONE, FOUND)
    assert "narrowly" not in " ".join(cautions(board, [replace(c, low=0.1) for c in compared]))
    narrow = [replace(c, verdict="better", low=-0.01) for c in compared]
    assert "decided narrowly" in " ".join(cautions(board, narrow))
    wide = [replace(c, verdict="equivalent", low=0.0, high=1.0) for c in compared]
    assert "decided narrowly" in " ".join(cautions(board, wide))
