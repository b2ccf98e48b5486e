"""The answer in sentences: the first thing a reader sees has to be right."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lab.report import sample
from normkit.lab.report.answer import Answer, answer, cautions
from normkit.lab.report.page import page
from normkit.lab.report.scores import Scoreboard
from normkit.lab.results import Comparison
from normkit.lab.statistics import compare

ONE = sample.experiment(("bn", "bcn"), {"train.worker_batch": (2,)})
FOUND = sample.results(ONE)
CELL = ONE.cells()[0]


def comparison(**more: Any) -> Comparison:
    made = sample.comparisons(ONE, FOUND)[0]
    given = {"difference": 0.031, "low": 0.022, "high": 0.040, "pairs": 5, "verdict": "better"}
    return replace(made, **{**given, **more})


def said(*found: Comparison) -> Answer:
    return answer(Scoreboard(ONE, FOUND), found)


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
    lost = comparison(verdict="unstable", pairs=3, diverged=2)
    assert said(lost).lead == (
        "bcn cannot be judged against bn, since not every seed survived at 2 samples a worker: it "
        "diverged at 2 of 5 seeds; the survivors alone: +3.1 points, 95 % interval 2.2 to 4.0, "
        "3 seeds."
    )
    collapsed = comparison(verdict="unstable", pairs=4, baseline_collapsed=1)
    assert ": bn collapsed at 1 of 5 seeds; the survivors alone: +3.1" in said(collapsed).lead


def test_the_page_leads_with_what_is_stable() -> None:
    """Seven of ten seeds diverged, and the page began with "better", from the three that lived."""
    made = sample.experiment(("bn", "bcn", "gn"), {}, seeds=3)
    found = sample.results(made, diverged=[("bcn", 1), ("bcn", 3)])
    whole = answer(Scoreboard(made, found), compare(made, found))
    assert whole.lead.startswith(
        "Stable with every seed: bn and gn. Not stable: bcn (2 of 3 seeds diverged). gn "
    )
    (_, lines), *_ = whole.groups
    assert [(line.name, line.verdict) for line in lines][-1] == ("bcn", "unstable")
    assert lines[-1].numbers.startswith("it diverged at 2 of 3 seeds; the survivors alone: ")


def test_the_lead_is_the_largest_improvement() -> None:
    made = sample.experiment()
    found = sample.results(made)
    whole = answer(Scoreboard(made, found), sample.comparisons(made, found))
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
    found = [comparison(verdict=each, p_difference=0.3) for each in verdicts]
    assert said(*found).lead == lead


def test_what_only_the_correction_keeps_from_being_better_is_named() -> None:
    near = comparison(verdict="not shown", p_difference=0.04, more_seeds=3)
    assert said(near, comparison(verdict="worse", p_difference=0.01)).lead == (
        "Nothing was shown to be better than bn. Nearest to it is bcn at 2 samples a worker: "
        "+3.1 points, 95 % interval 2.2 to 4.0, 5 seeds; about 3 more seeds would decide."
    )


def test_the_lead_names_the_others_that_are_better() -> None:
    here = [comparison(), comparison(variant="gn", difference=0.02)]
    assert said(*here).lead.endswith("5 seeds. Also better: gn.")
    far = comparison(variant="gn", difference=0.02, cell=(("train.worker_batch", 64),))
    assert said(comparison(), far).lead.endswith("Also better: gn at 64 samples a worker.")


def test_a_baseline_that_diverged_is_an_answer() -> None:
    """It said that no seed was finished by both, and left it to the reader to find out why."""
    made = sample.experiment(("bn", "bcn", "gn"), {"train.worker_batch": (2,)}, seeds=2)
    lost = [("bn", 1), ("bn", 2), ("gn", 2)]
    board = Scoreboard(made, sample.results(made, diverged=lost))
    found = answer(board, sample.comparisons(made, sample.results(made, diverged=lost)))
    assert found.lead == ("bn diverged, and nothing can be compared with it. Without a loss: bcn.")
    assert found.tone == "diverged"
    lines = {line.name: line.numbers for line in found.groups[0][1]}
    assert lines["bcn"] == "no seed was finished by both; bn diverged at 2 of 2 seeds"


def test_one_seed_says_what_a_verdict_needs() -> None:
    alone = comparison(verdict="not shown", pairs=1, low=float("nan"), high=float("nan"))
    assert said(alone).lead.endswith("1 seed; a verdict needs at least 2, better 5.")
    made = sample.experiment(("bn", "bcn"), {"train.worker_batch": (2,)}, seeds=1)
    assert "1 seed: nothing can be shown" in " ".join(
        cautions(Scoreboard(made, sample.results(made)))
    )


def test_many_cells_are_counted() -> None:
    made = sample.experiment(("bn", "bcn", "gn"), {"train.worker_batch": (2, 4, 8, 16, 64)})
    found = sample.results(made)
    compared = [
        replace(c, verdict="better" if c.variant == "gn" else "worse")
        for c in sample.comparisons(made, found)
    ]
    whole = answer(Scoreboard(made, found), compared)
    assert whole.groups == ()
    assert [(tally.name, dict(tally.counts)) for tally in whole.tallies] == [
        ("gn", {"better": 5, "worse": 0}),
        ("bcn", {"better": 0, "worse": 5}),
    ]
    assert [tally.cells for tally in whole.tallies] == [5, 5]


def test_error_that_falls_is_better() -> None:
    made = sample.experiment(("bn", "bcn"), {"train.worker_batch": (2,)}, metric="error")
    found = sample.results(made)
    lead = answer(Scoreboard(made, found), sample.comparisons(made, found)).lead
    assert lead.startswith("bcn is better than bn at 2 samples a worker: error ")
    assert "points lower" in lead


@pytest.mark.parametrize(
    ("difference", "low", "high", "numbers"),
    [
        (0.011, 0.004, 0.02, "error 1.1 points lower, 95 % interval 0.4 to 2.0 lower"),
        (-0.011, -0.02, -0.004, "error 1.1 points higher, 95 % interval 0.4 to 2.0 higher"),
        (-0.001, -0.023, 0.048, "error 0.1 points higher, 95 % interval 2.3 higher to 4.8 lower"),
    ],
)
def test_an_interval_has_the_sign_of_its_difference(
    difference: float, low: float, high: float, numbers: str
) -> None:
    """It said "error 0.1 points higher, 95 % interval −2.3 to 4.8", with −2.3 for 2.3 higher."""
    made = replace(ONE, metric="error")
    one = comparison(verdict="not shown", difference=difference, low=low, high=high)
    assert numbers in answer(Scoreboard(made, FOUND), [one]).lead


def test_nothing_run_yet() -> None:
    whole = answer(Scoreboard(ONE, {}), sample.comparisons(ONE, {}))
    assert whole.lead == "Nothing has been run yet, so there is no answer yet."
    assert cautions(Scoreboard(ONE, {})) == []


def test_cautions_name_what_weakens_the_answer() -> None:
    made = sample.experiment(("bn", "bcn"), {"train.worker_batch": (2,)}, seeds=3)
    found = sample.results(made, diverged=[("bcn", 2)], left_out=[("bn", 3)])
    other = next(iter(found))
    found[other] = replace(found[other], environment={"torch": "2.10.0"})
    text = " ".join(cautions(Scoreboard(made, found)))
    assert "1 of 6 runs are not finished" in text
    assert "bcn diverged: seed 2 at 2 samples a worker." in text
    assert "3 seeds: too few" in text
    assert "not all made with the same versions" in text


def test_cautions_say_what_failed() -> None:
    found = sample.results(ONE, left_out=[("bcn", 1), ("bcn", 2)])

    def board(*failed: str) -> Scoreboard:
        return Scoreboard(ONE, found, failed)

    first, second = (ONE.variant("bcn", CELL).runs(ONE.seeds)[k].id for k in (0, 1))
    text = " ".join(cautions(board(first, "of another experiment")))
    assert "2 of 10 runs are not finished, 1 of them failed: this is what can be said" in text
    assert "2 of 10 runs failed: " in " ".join(cautions(board(first, second)))
    done = ONE.variant("bn", CELL).runs(ONE.seeds)[0].id
    assert "failed" not in " ".join(cautions(board(done)))
    assert "failed" not in " ".join(cautions(board()))


def test_ways_of_computing_are_no_other_environment() -> None:
    found = {
        run: replace(result, environment={**result.environment, "side by side": str(k % 3)})
        for k, (run, result) in enumerate(FOUND.items())
    }
    assert cautions(Scoreboard(ONE, found)) == []


def test_that_survivors_decide_is_said() -> None:
    made = sample.experiment(("bn", "bcn"), {}, losses="survivors")
    lost = Scoreboard(made, sample.results(made, diverged=[("bcn", 1)]))
    assert "Verdicts are about survivors" in " ".join(cautions(lost))
    assert "survivors" not in " ".join(cautions(Scoreboard(made, sample.results(made))))


def test_a_rule_of_the_file_is_said() -> None:
    made = sample.experiment(("bn", "bcn", "gn"), {}, seeds=6, multiplicity="none", looks=(3, 6, 9))
    found = sample.results(made, left_out=[("gn", 5)])
    text = " ".join(cautions(Scoreboard(made, found)))
    assert "The 2 comparisons are not corrected for their number, as the file asks (multi" in text
    assert "up to 10 % of such experiments have a wrong verdict somewhere" in text
    assert (
        "Looks are planned after 3, 6 and 9 seeds. These are the verdicts after 3 seeds; the next "
        "look is after 6." in text
    )
    waiting = sample.results(made, left_out=[("gn", 1)])
    assert "Verdicts wait for the first look, after 3 seeds." in " ".join(
        cautions(Scoreboard(made, waiting))
    )
    usual = page(made, found, compare(made, found))
    assert "Planned looks" in usual
    assert "not corrected for their number (two-sided paired t-tests)" in usual
