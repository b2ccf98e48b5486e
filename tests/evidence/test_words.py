"""How answers are put: of how many rows, of which pairs, of which code."""

from __future__ import annotations

import dataclasses
import re

import pytest

from claims_made_up import claim_of, made_up
from normkit.lab.results import Result
from tools.evidence.asides import losses_of_pairs, lost_runs, training_accuracies
from tools.evidence.claims import ALL, experiment_of
from tools.evidence.evidence import Evidence
from tools.evidence.judge import NOT_RUN, judge
from tools.evidence.page import TEXT
from tools.evidence.provenance import across_sweeps, code_states, provenance
from tools.evidence.words import (
    answer_in_words,
    differences_in_words,
    not_run_in_words,
    pairs_in_words,
)


def run_ids(file: str, variant: str, warmup: int, seeds: range) -> list[str]:
    [one] = [
        each
        for each in experiment_of(file).variants
        if each.name == variant and dict(each.cell)["train.warmup"] == warmup
    ]
    return [run.id for run in one.runs(tuple(seeds))]


def test_rows_that_were_not_run_are_counted_where_each_value_was_run_somewhere() -> None:
    """ "whatever the threshold" was said to hold: τ = 0.15 had both schedules, the others one."""
    claim = claim_of("UBN beats BN whatever the threshold")
    gain = dict.fromkeys(claim.expected, 0.02)
    results = made_up("g-threshold", gain)
    every = judge(claim, results)
    assert (answer_in_words(claim, every), pairs_in_words(every)) == ("holds", "5")
    assert not_run_in_words(claim, every) == ""
    for name in ("ubn, τ = 0.025", "ubn, τ = 0.25"):
        for run in run_ids("g-threshold", name, 0, range(1, 6)):
            del results[run]
    results |= made_up("g-ubn", {"ubn": 0.02}, seeds=15)  # the runs at 0.15
    rows = judge(claim, results)
    assert answer_in_words(claim, rows) == "holds (4 of 6 rows run)"
    assert not_run_in_words(claim, rows) == "ubn, τ = 0.025, no warm-up; ubn, τ = 0.25, no warm-up"
    assert pairs_in_words(rows) == "5–15"


def test_which_side_a_mean_is_on_is_said_of_the_claim() -> None:
    """ "looks better" stood where the claim is that something is worse."""
    for text, gain, side in (
        ("the second position is better than the first and the third", -0.001, "towards"),
        ("the second position is better than the first and the third", 0.001, "against"),
        ("UBN beats BN whatever the threshold", 0.001, "towards"),
    ):
        claim = claim_of(text)
        results = made_up(claim.file, dict.fromkeys(claim.expected, gain), seeds=2)
        rows = [
            dataclasses.replace(row, verdict="not shown", answer="not shown", difference=gain)
            for row in judge(claim, results)
        ]
        assert {row.said for row in rows} == {f"not shown, leans {side} it"}


def test_many_differences_are_a_range() -> None:
    claim = claim_of("UBN beats BN whatever the threshold")
    gains = {name: 0.02 + i / 100 for i, name in enumerate(claim.expected)}
    rows = judge(claim, made_up("g-threshold", gains))
    assert re.fullmatch(r"\+[12]\.\d\d to \+[34]\.\d\d", differences_in_words(claim, rows))
    assert differences_in_words(claim, rows[:2]).count(", ") == 1


def test_values_are_named_where_all_their_rows_were_run() -> None:
    claim = claim_of("UBN beats BN whatever the threshold")
    results = made_up("g-threshold", dict.fromkeys(claim.expected, 0.02))
    for name in claim.expected:
        for run in run_ids("g-threshold", name, 0, range(1, 6)):
            del results[run]
    rows = judge(claim, results)
    assert answer_in_words(claim, rows) == "holds (1 of 2 schedules run)"
    assert not_run_in_words(claim, rows) == "all without warm-up"


def test_no_pair_is_no_number() -> None:
    claim = claim_of("channels of spread 4 cost accuracy too, or training fails")
    rows = judge(claim, made_up("o-singularities", {}, seeds=1, collapsed="shifted"))
    assert {row.pairs for row in rows} == {0}
    assert pairs_in_words(rows) == ""


def with_losses(result: Result, first: float, last: float) -> Result:
    losses = [first, *[None] * (len(result.epochs) - 2), last]
    epochs = zip(result.epochs, losses, strict=True)
    return dataclasses.replace(
        result,
        epochs=tuple(
            dataclasses.replace(epoch, train_loss=loss, train_accuracy=last / 10)
            for epoch, loss in epochs
        ),
    )


def test_training_losses_are_of_the_pairs_that_were_compared() -> None:
    """Means were over all runs of each side, lost ones too, and of seeds that the other lacked."""
    claim = claim_of("BCN + WS beats BN")
    results = made_up("l-ws-bcn", {}, collapsed="bcn + ws")
    ours, theirs = (run_ids("l-ws-bcn", name, 0, range(1, 6)) for name in ("bcn + ws", "bn"))
    for runs, first, last in ((ours, 4.0, 0.25), (theirs, 1.5, 0.5)):
        for place, run in enumerate(runs):
            paired = place in (1, 2)  # our first run is lost, of the last ones the other is missing
            results[run] = with_losses(results[run], *((first, last) if paired else (8.0, 8.0)))
    del results[ours[4]], results[theirs[3]]
    rows = judge(claim, results)
    told = [losses_of_pairs(claim, row, results) for row in rows]
    assert told == ["4.000 to 0.250; 1.500 to 0.500", ""]
    assert [training_accuracies(claim, row, results) for row in rows] == ["2.5; 5.0", ""]
    assert lost_runs(claim, rows, results).startswith(
        "Lost: bcn + ws, no warm-up, seed 1: collapsed, training loss 8.000 to 8.000; "
        "bcn + ws, warm-up, seed 1: collapsed"
    )


def test_lost_runs_of_one_kind_are_told_together() -> None:
    claim = claim_of("BCN + WS beats BN")
    results = made_up("l-ws-bcn", {}, collapsed="bcn + ws")
    first, other = run_ids("l-ws-bcn", "bcn + ws", 0, range(1, 3))
    results[other] = dataclasses.replace(results[first], run=other)
    lost = lost_runs(claim, judge(claim, results), results)
    assert "bcn + ws, no warm-up, seeds 1, 2: collapsed; " in lost
    results = {run: with_losses(each, 3.8e15, 2.3) for run, each in results.items()}
    lost = lost_runs(claim, judge(claim, results), results)
    assert "training loss 3.8e+15 to 2.300" in lost


def test_every_answer_is_explained() -> None:
    """ "better, not shown whether slightly" stood in a table alone."""
    explained = set(re.findall(r"\*([^*]+?)\*", TEXT.replace("\n", " ")))
    said = {
        row.said.removesuffix(", leans towards it").removesuffix(", leans against it")
        for rows in Evidence().rows
        for row in rows
        if row.answer != NOT_RUN
    }
    assert {"better, not shown whether slightly", "not shown, no difference found"} <= said
    assert said <= explained


def from_code(results: dict[str, Result], commit: str, sweep: str) -> dict[str, Result]:
    code = {"sweep": sweep} | ({"commit": commit} if commit else {})
    return {run: dataclasses.replace(each, environment=code) for run, each in results.items()}


@pytest.mark.parametrize(("moved", "mixed"), [((), 0), ((0,), 1), ((0, 1), 2)])
def test_the_page_says_of_which_code_runs_are_and_which_sweeps_are_paired(
    moved: tuple[int, ...], mixed: int
) -> None:
    results = from_code(made_up("g-ubn", {"ubn": 0.02}), "0123456789ab with changes", "0")
    for warmup in moved:  # one run of a schedule is of another sweep
        [run] = run_ids("g-ubn", "ubn", warmup, range(1, 2))
        results |= from_code({run: results[run]}, "0123456789ab" if warmup else "", "3")
    own = claim_of("UBN beats BN at the end")
    rows = [judge(claim, results) if claim is own else [] for claim in ALL]
    assert across_sweeps(rows, results) == (mixed, 2)
    states = code_states(results.values())
    assert (states["changed"], states["unknown"], states["clean"]) == (
        20 - mixed,
        int(0 in moved),
        int(1 in moved),
    )
    text = provenance(rows, results)
    assert text.startswith(f"{20 - mixed} runs are of a commit with changes that were not")
    assert f"; {mixed} of 2 comparisons pair runs of different sweeps" in text
    assert "; 0 were trained step by step" in text
    [run] = run_ids("g-ubn", "bn", 0, range(1, 2))
    by_step = {"recorded": "no: it was not wanted", "sweep": "0"}
    results[run] = dataclasses.replace(results[run], environment=by_step)
    assert "; 1 were trained step by step" in provenance(rows, results)


def test_a_sweep_of_no_pair_does_not_count() -> None:
    """A seed that only one side has is not compared."""
    results = from_code(made_up("g-ubn", {"ubn": 0.02}), "", "0")
    [alone, partner] = (run_ids("g-ubn", name, 0, range(5, 6))[0] for name in ("ubn", "bn"))
    results |= from_code({alone: results[alone]}, "", "1")
    del results[partner]
    own = claim_of("UBN beats BN at the end")
    rows = [judge(claim, results) if claim is own else [] for claim in ALL]
    assert across_sweeps(rows, results) == (0, 2)
