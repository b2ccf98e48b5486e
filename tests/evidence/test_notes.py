"""What the notes on claims say in words is what the committed results give."""

from __future__ import annotations

import math
import re
from collections import Counter

import pytest

from claims_made_up import claim_of
from normkit.conversion.recipes.bgn import groups_for
from normkit.lab.results import DONE, Result
from normkit.lab.statistics import decide
from tools.evidence.claims import ALL, CLAIMS, experiment_of
from tools.evidence.collapse import rows as collapse_rows
from tools.evidence.judge import NOT_RUN, NOT_SHOWN, all_seeds, judge
from tools.evidence.results import read_all
from tools.evidence.which import which_page

FILES = {path.stem for path in CLAIMS.glob("*.toml")}
ONE_ANSWER = math.log(10)  # the loss of ten classes


@pytest.fixture(scope="module")
def pool() -> dict[str, Result]:
    return read_all()


def found(pool: dict[str, Result], file: str, variant: str, **cell: object) -> dict[int, Result]:
    """By seed, the runs of a variant where the cell has these values of train."""
    return {
        run.seed: pool[run.id]
        for each in experiment_of(file).variants
        if each.name == variant
        and all(dict(each.cell)[f"train.{key}"] == value for key, value in cell.items())
        for run in each.runs(all_seeds())
        if run.id in pool
    }


def losses(result: Result) -> list[float]:
    return [each.train_loss for each in result.epochs if each.train_loss is not None]


def test_notes_stand_alone() -> None:
    """ "next claim" and "the two claims after it" were copied to a page where nothing follows."""
    notes = {claim.text: claim.note for claim in ALL if claim.note}
    places = re.compile(r"\b(claims?|below|the table|next)\b|\babove[.,;]|-20 above")
    assert {text: note for text, note in notes.items() if places.search(note)} == {}
    named = set(re.findall(r"\b[a-p]-[a-z][\w-]+", " ".join(notes.values())))
    assert {"a-wider", "g-ubn"} <= named <= FILES
    mind = which_page().partition("## What to mind")[2]
    assert "a-wider" in mind
    assert not places.search(re.sub(r"^.*?\n- ", "", mind.partition("## By claim")[0], flags=re.S))


def test_which_runs_of_a_resnet18_gave_one_answer_and_left_it(pool: dict[str, Result]) -> None:
    large, micro = (
        found(pool, "l-resnet18", name, warmup=0) for name in ("bcn + ws", "bcn + ws, micro")
    )
    for each in (*large.values(), *micro.values()):
        assert losses(each)[0] > ONE_ANSWER
    assert [seed for seed, each in large.items() if each.outcome("accuracy") == DONE] == [3, 4]
    assert {each.outcome("accuracy") for each in micro.values()} == {"collapsed"}
    assert (len(large), len(micro)) == (5, 5)
    every = [
        found(pool, file, "bcn + ws") for file in ("l-ws-bcn", "m-worker-batch", "p-damaged-images")
    ]
    assert {each.outcome("accuracy") for runs in every for each in runs.values()} == {DONE}


def test_first_steps_of_the_layers_and_of_plain_torch() -> None:
    steps = {(row["warmup"], row["by"]): row["losses"] for row in collapse_rows()}
    assert Counter(row["seed"] for row in collapse_rows()) == {1: 4}
    for warmup in (0, 391):
        ours, theirs = steps[warmup, "layers"], steps[warmup, "torch"]
        assert ours == pytest.approx(theirs, rel=0.02)
        assert len(ours) == 6
    for by in ("layers", "torch"):
        cold, warm = steps[0, by], steps[391, by]
        assert cold[0] > 2 * ONE_ANSWER  # a network at its start is near it
        assert cold[-1] == pytest.approx(ONE_ANSWER, abs=0.01)
        assert max(warm) == warm[0] < 2.5
        assert min(warm) == warm[-1] < ONE_ANSWER


def test_small_scales_and_gates_beside_the_papers_method(pool: dict[str, Result]) -> None:
    """(c) repeated what the paper says of c = 1; of RBN and IEBN it was nowhere on the page."""
    scales = judge(claim_of("small start scales (γ = 0.1) do worse without c = 100"), pool)
    assert [(row.variant, row.answer, row.pairs) for row in scales] == [
        ("γ 0.1, c 1", "contradicted", 5)
    ] * 2
    [gates] = [claim for claim in ALL if claim.text.startswith("RBN and IEBN are behind")]
    rows = judge(gates, pool)
    assert [row.answer for row in rows] == ["contradicted"] * 8
    assert min(row.difference for row in rows) > 0.06


def test_forms_of_the_scale_beside_the_plain_batch_norm(pool: dict[str, Result]) -> None:
    """ "All three are behind γ = 1" is shown of A1 and A2 with warm-up only."""
    verdicts = {}
    for warmup in (0, 1):
        plain = found(pool, "a-small-start-scale", "γ 1", warmup=warmup)
        gaps = []
        for name in ("a1", "a2"):
            ours = found(pool, "e-forms-of-the-scale", name, warmup=warmup, lr=0.1)
            gaps.append(
                [each.score("accuracy") - plain[s].score("accuracy") for s, each in ours.items()]
            )
        assert all(sum(each) < 0 for each in gaps)
        verdicts[warmup] = [each.verdict for each in decide(gaps, 0.005)]
    assert verdicts == {0: ["not shown", "not shown"], 1: ["worse", "worse"]}


def test_what_decides_a_small_start_scale(pool: dict[str, Result]) -> None:
    claims = {claim.file: claim for claim in ALL if claim.letter == "a"}
    answers = {
        file: [row.answer for row in judge(claim, pool) if row.answer != NOT_RUN]
        for file, claim in claims.items()
    }
    assert answers == {
        "a-small-start-scale": ["contradicted"] * 2,
        "a-resnet18": ["holds"],
        "a-wider": ["holds"],
        "a-longer": [NOT_SHOWN],
    }


def test_bottlenecks_with_a_batch_free_norm_train_as_well(pool: dict[str, Result]) -> None:
    """A deficit on test images was spoken of where no row shows one."""
    claim = claim_of("a batch-free norm in each bottleneck beats BN, wherever it stands")
    rows = [row for row in judge(claim, pool) if row.answer != NOT_RUN]
    assert {row.answer for row in rows} == {NOT_SHOWN}
    plain = found(pool, claim.file, "bn", warmup=1)
    for name in claim.expected:
        ours = found(pool, claim.file, name, warmup=1)
        gaps = [losses(each)[-1] - losses(plain[seed])[-1] for seed, each in ours.items()]
        assert abs(sum(gaps) / len(gaps)) < 0.05


def test_uncentred_images(pool: dict[str, Result]) -> None:
    cold, warm = (found(pool, "h-uncentred-images", "ubn", warmup=warmup) for warmup in (0, 1))
    assert (len(cold), len(warm)) == (1, 5)
    for warmup, ours in ((0, cold), (1, warm)):
        plain = found(pool, "h-uncentred-images", "bn", warmup=warmup)
        assert all(each.score("accuracy") > plain[s].score("accuracy") for s, each in ours.items())


def test_instance_norms_lose_less_and_have_less(pool: dict[str, Result]) -> None:
    scores = {
        name: [
            each.score("accuracy")
            for each in found(pool, "k-disturbed-statistics", name, warmup=1).values()
        ]
        for name in ("bn", "xbn, gn", "xbn, in")
    }
    assert max(scores["xbn, in"]) < min(scores["xbn, gn"]) < min(scores["bn"])


def test_groups_by_the_rule_of_bgn() -> None:
    """The note on eight images names their number."""
    [claim] = [claim for claim in ALL if "eight images" in claim.text]
    assert f"{groups_for(8)} groups for eight images" in claim.note
