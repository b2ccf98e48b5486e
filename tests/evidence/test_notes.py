"""What the notes on claims say in words is what the committed results give."""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from itertools import pairwise, product

import pytest

from claims_made_up import claim_of
from normkit.conversion.recipes.bgn import groups_for
from normkit.lab.results import DONE, Result
from normkit.lab.statistics import decide
from normkit.lab.train.corruption import CORRUPTIONS
from tools.evidence.claims import ALL, CLAIMS, experiment_of
from tools.evidence.collapse import CASES
from tools.evidence.collapse import rows as collapse_rows
from tools.evidence.judge import CONTRADICTED, NOT_RUN, NOT_SHOWN, all_seeds, judge, measured
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


def curve(runs: dict[int, Result]) -> list[float]:
    """Mean training losses, epoch by epoch."""
    return [statistics.fmean(each) for each in zip(*map(losses, runs.values()), strict=True)]


def mean(runs: dict[int, Result]) -> float:
    return statistics.fmean(each.score("accuracy") for each in runs.values())


def in_training(runs: dict[int, Result]) -> float:
    """Mean accuracy on training images, over the last epoch."""
    return statistics.fmean(each.epochs[-1].train_accuracy for each in runs.values())


def verdicts(*pairs: tuple[dict[int, Result], dict[int, Result]]) -> list[str]:
    """Of paired seeds, decided together."""
    gaps = [
        [ours[seed].score("accuracy") - theirs[seed].score("accuracy") for seed in ours]
        for ours, theirs in pairs
    ]
    return [each.verdict for each in decide(gaps, 0.005)]


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
        # by the loss, which is above that of one answer, it could not be told
        assert each.epochs[0].train_accuracy == pytest.approx(0.1, abs=0.005)
        assert losses(each)[0] > ONE_ANSWER
    [note] = [claim.note for claim in ALL if claim.text == "BCN + WS beats BN in a ResNet-18"]
    assert "By their training accuracy all ten runs" in note
    assert "BN learns more slowly without warm-up here, too, but learns" in note
    for name in ("bn", "bn, 2 a worker"):
        cold, warm = (found(pool, "l-resnet18", name, warmup=w) for w in (0, 1))
        assert curve(cold)[-1] > curve(warm)[-1]
        assert verdicts((warm, cold)) == ["better"]
        assert {each.outcome("accuracy") for each in cold.values()} == {DONE}
    assert [seed for seed, each in large.items() if each.outcome("accuracy") == DONE] == [3, 4]
    assert {each.outcome("accuracy") for each in micro.values()} == {"collapsed"}
    assert (len(large), len(micro)) == (5, 5)
    warm = [found(pool, "l-resnet18", name, warmup=1) for name in ("bcn + ws", "bcn + ws, micro")]
    assert [len(runs) for runs in warm] == [5, 5]
    assert {each.outcome("accuracy") for runs in warm for each in runs.values()} == {DONE}
    every = [
        found(pool, file, "bcn + ws") for file in ("l-ws-bcn", "m-worker-batch", "p-damaged-images")
    ]
    assert {each.outcome("accuracy") for runs in every for each in runs.values()} == {DONE}


def test_the_micro_batch_form_beside_its_rivals(pool: dict[str, Result]) -> None:
    micro, sync = (found(pool, "l-resnet18", name, warmup=1) for name in ("bcn + ws, micro", "bn"))
    assert verdicts((micro, sync)) == ["better"]
    cold, pair = (
        found(pool, "l-resnet18", name, warmup=0) for name in ("bcn + ws, micro", "bn, 2 a worker")
    )
    for each in (*cold.values(), *pair.values()):
        assert losses(each)[0] > ONE_ANSWER
    assert min(losses(each)[-1] for each in cold.values()) == pytest.approx(ONE_ANSWER, abs=0.01)
    assert max(losses(each)[1] for each in pair.values()) < ONE_ANSWER


def test_first_steps_of_the_layers_and_of_plain_torch() -> None:
    steps = {(row["variant"], row["warmup"], row["by"]): row["losses"] for row in collapse_rows()}
    cases = {(row["of"], row["variant"]) for row in collapse_rows()}
    assert cases == {(file, name) for file, names in CASES.items() for name in names}
    assert Counter(row["seed"] for row in collapse_rows()) == {1: 4 * len(cases)}
    assert {len(each) for each in steps.values()} == {6}
    for warmup in (0, 391):
        ours, theirs = (steps["bcn + ws", warmup, by] for by in ("layers", "torch"))
        assert ours == pytest.approx(theirs, rel=0.02)
    for (_, name), by in product(cases, ("layers", "torch")):
        cold, warm = steps[name, 0, by], steps[name, 391, by]
        assert cold[0] > 2 * ONE_ANSWER  # a network at its start is near it
        assert f"{cold[-1]:.1f}" == f"{ONE_ANSWER:.1f}"
        assert max(warm) < 2.5
        if name == "bcn + ws":
            assert max(warm) == warm[0]
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
    told = {}
    for warmup in (0, 1):
        plain = found(pool, "a-small-start-scale", "γ 1", warmup=warmup)
        gaps = []
        for name in ("a1", "a2"):
            ours = found(pool, "e-forms-of-the-scale", name, warmup=warmup, lr=0.1)
            gaps.append(
                [each.score("accuracy") - plain[s].score("accuracy") for s, each in ours.items()]
            )
        assert all(sum(each) < 0 for each in gaps)
        told[warmup] = [each.verdict for each in decide(gaps, 0.005)]
    assert told == {0: ["not shown", "not shown"], 1: ["worse", "worse"]}


def test_what_decides_a_small_start_scale(pool: dict[str, Result]) -> None:
    claims = {claim.file: claim for claim in ALL if claim.letter == "a"}
    answers = {
        file: [row.answer for row in judge(claim, pool) if row.answer != NOT_RUN]
        for file, claim in claims.items()
    }
    assert answers == {
        "a-small-start-scale": ["contradicted"] * 2,
        "a-resnet18": ["holds", "does not hold"],  # without warm-up, with
        "a-wider": ["holds"],
        "a-longer": [NOT_SHOWN],
    }
    for file in ("a-resnet18", "a-wider"):
        small, plain = (found(pool, file, name, warmup=0) for name in ("γ 0.1, c 100", "γ 1"))
        for seed, each in small.items():
            assert all(a < b for a, b in zip(losses(each), losses(plain[seed]), strict=True))
    cold = found(pool, "a-resnet18", "γ 0.1, c 100", warmup=0)
    warm = [found(pool, "a-resnet18", name, warmup=1) for name in ("γ 1", "γ 0.1, c 100")]
    assert "better" not in verdicts(*((each, cold) for each in warm))


XBN = ("xbn, first", "xbn, second", "xbn, third")
FEWER = ("xbn, every 2nd", "xbn, every 4th", "xbn, every 8th")


def test_bottlenecks_with_a_batch_free_norm(pool: dict[str, Result]) -> None:
    """Behind in training without warm-up; with it, if at all, on test images alone."""
    claim = claim_of("a batch-free norm in each bottleneck beats BN, wherever it stands")
    answers: dict[object, set[str]] = {}
    for row in judge(claim, pool):
        answers.setdefault(dict(row.cell)["train.warmup"], set()).add(row.answer)
    assert answers == {0: {NOT_SHOWN, CONTRADICTED}, 1: {NOT_SHOWN}}
    assert tuple(claim.expected) == XBN
    cold, warm = ({n: found(pool, claim.file, n, warmup=w) for n in ("bn", *XBN)} for w in (0, 1))
    assert max(losses(each)[0] for each in cold["bn"].values()) < ONE_ANSWER
    for name in XBN:
        assert min(losses(each)[0] for each in cold[name].values()) > ONE_ANSWER
        deficit = mean(cold["bn"]) - mean(cold[name])
        assert in_training(cold["bn"]) - in_training(cold[name]) > deficit / 2
        assert abs(curve(warm[name])[-1] - curve(warm["bn"])[-1]) < 0.05
        lacks = mean(warm["bn"]) - mean(warm[name])
        assert in_training(warm["bn"]) - in_training(warm[name]) < lacks / 4
    assert verdicts((warm["bn"], cold["bn"])) == ["better"]
    assert "It is the method" not in claim.note  # batch norms do the same
    assert "BN does the same, and so does plain torch" in claim.note
    assert ("GN in this network, was not run" in claim.note) == (
        not found(pool, claim.file, "gn", warmup=1)
    )
    for runs in (cold, warm):
        for name, each in runs.items():
            assert (in_training(each) > mean(each)) == (name != "bn")


def test_group_norms_without_warmup(pool: dict[str, Result]) -> None:
    """Told beside bottlenecks: alone they learn more slowly, and not with WS."""
    plain, ws, bn = (
        {w: found(pool, "l-ws-bcn", name, warmup=w) for w in (0, 1)}
        for name in ("gn", "gn + ws", "bn")
    )
    assert verdicts((plain[1], plain[0]), (ws[1], ws[0])) == ["better", "not shown"]
    assert curve(plain[0])[-1] > curve(plain[1])[-1]
    assert curve(ws[0])[-1] < curve(ws[1])[-1]
    for warmup in (0, 1):
        assert in_training(plain[warmup]) > mean(plain[warmup]) + 0.01
        assert in_training(bn[warmup]) < mean(bn[warmup]) + 0.01


def test_fewer_blocks_with_a_batch_free_norm(pool: dict[str, Result]) -> None:
    names = ("bn", *reversed(FEWER), "xbn, second")
    runs = [found(pool, "j-xbn-positions", name, warmup=0) for name in names]
    first = [curve(each)[0] for each in runs]
    assert first == sorted(first)
    plain, eighth = runs[:2]
    assert in_training(plain) - in_training(eighth) < (mean(plain) - mean(eighth)) / 2


def test_few_images_a_worker_and_where_accuracy_is_lost(pool: dict[str, Result]) -> None:
    runs = {
        (name, size, warmup): found(pool, "m-worker-batch", name, worker_batch=size, warmup=warmup)
        for name, size, warmup in product(("bn", "gn", "bgn", "gbgn", "in"), (128, 8, 2, 1), (0, 1))
    }
    last = {key: curve(each)[-1] for key, each in runs.items() if each}
    for name in ("gn", "bgn"):
        assert last[name, 2, 0] > last[name, 2, 1]
        for warmup in (0, 1):
            assert last[name, 2, warmup] > last["bn", 2, warmup]
            assert last[name, 1, warmup] > last["bn", 1, warmup]
    assert last["bn", 2, 0] < last["bn", 2, 1]
    assert abs(last["bn", 1, 1] - last["in", 1, 1]) < 0.05
    rivals = [("gbgn", 2, 0), ("gbgn", 2, 1), ("bn", 128, 0), ("bn", 128, 1), ("bn", 8, 1)]
    for name, size, warmup in rivals:
        assert last["bgn", size, warmup] > last[name, size, warmup]
    for warmup in (0, 1):
        one = runs["bn", 1, warmup]
        assert mean(one) < in_training(one) / 2
        gaps = [
            in_training(runs[name, 1, warmup]) - mean(runs[name, 1, warmup])
            for name in ("bgn", "gbgn", "bn")
        ]
        assert gaps == sorted(gaps)
        assert gaps[0] > 0.05
        for name in ("bgn", "gbgn", "bn"):  # of two images hardly any is lost
            assert in_training(runs[name, 2, warmup]) - mean(runs[name, 2, warmup]) < 0.01
    alone, several = (
        claim_of(f"with {many} a worker GN, BGN and BCN + WS (micro) beat BN").note
        for many in ("one image", "two images")
    )
    assert "BGN and GBGN lose in the same way, but less, BGN the least" in alone
    assert "BN does not in this network (in a ResNet-18 it does" in several


def test_what_is_above_bgn_with_two_images(pool: dict[str, Result]) -> None:
    claim = claim_of("with two images a worker BGN with its rule beats GN, LN, IN and PN")
    rows = [row for row in judge(claim, pool) if row.answer != NOT_RUN]
    sides = {name: {r.difference > 0 for r in rows if r.variant == name} for name in claim.expected}
    assert sides == {"gn": {True}, "in": {True}, "ln": {False}, "pn": {False}}
    assert claim.note.startswith("Means of GN and IN are higher, those of LN and PN lower.")
    assert groups_for(2) == 1


def test_xbn_gains_most_by_contrast(pool: dict[str, Result]) -> None:
    claim = claim_of("XBN and BCN mind damaged test images less than BN")
    kinds = ["as it is", *CORRUPTIONS]
    left, adapted = (
        {
            name: dict(
                zip(
                    kinds,
                    map(
                        statistics.fmean,
                        zip(
                            *(
                                each.epochs[-1].measures[measure]
                                for each in found(pool, claim.file, name, warmup=1).values()
                            ),
                            strict=True,
                        ),
                    ),
                    strict=True,
                )
            )
            for name in ("bn", "xbn", "gn + ws")
        }
        for measure in ("corruption", "corruption_adapted")
    )
    gaps = {kind: left["xbn"][kind] - left["bn"][kind] for kind in CORRUPTIONS}
    assert gaps["contrast"] > sum(gaps.values()) / 2
    assert abs(adapted["xbn"]["contrast"] - adapted["bn"]["contrast"]) < 0.01
    assert left["gn + ws"]["contrast"] > left["gn + ws"]["as it is"] - 0.01
    means = [statistics.fmean(left[n][k] for k in CORRUPTIONS) for n in ("gn + ws", "xbn")]
    assert means[0] > means[1]
    both = [found(pool, claim.file, name, warmup=1) for name in ("gn + ws", "xbn")]
    assert verdicts((both[0], both[1])) == ["better"]
    assert "More than half of what XBN has left above BN is contrast alone" in claim.note


def test_which_spreads_make_training_fail(pool: dict[str, Result]) -> None:
    lost: dict[bool, set[bool]] = {}
    for variant in experiment_of("o-singularities").variants:
        if variant.name == "shifted":
            wide = dict(variant.cell)["norm.std_spread"] == 4
            outcomes = [
                pool[run.id].outcome("accuracy") != DONE
                for run in variant.runs(all_seeds())
                if run.id in pool
            ]
            lost.setdefault(wide, set()).update(outcomes)
    assert lost == {True: {True}, False: {False}}


def test_uncentred_images(pool: dict[str, Result]) -> None:
    for warmup in (0, 1):
        ours, plain = (
            found(pool, "h-uncentred-images", name, warmup=warmup) for name in ("ubn", "bn")
        )
        assert ours
        assert all(each.score("accuracy") > plain[s].score("accuracy") for s, each in ours.items())


@pytest.mark.parametrize("warmup", [0, 1])
def test_instance_norms_lose_less_and_have_less(pool: dict[str, Result], warmup: int) -> None:
    scores = {
        name: [
            each.score("accuracy")
            for each in found(pool, "k-disturbed-statistics", name, warmup=warmup).values()
        ]
        for name in ("bn", "xbn, gn", "xbn, in")
    }
    assert max(scores["xbn, in"]) < min(scores["xbn, gn"])
    assert max(scores["xbn, gn"]) < min(scores["bn"])
    shares = {
        name: [
            1
            - measured(each, "disturbance_left")
            / (measured(each, "disturbance_left") + measured(each, "disturbance"))
            for each in found(pool, "k-disturbed-statistics", name, warmup=warmup).values()
        ]
        for name in scores
    }
    for name, other in pairwise(("xbn, in", "xbn, gn", "bn")):
        assert max(shares[name]) < statistics.fmean(shares[other])
    note = claim_of("with a batch-free norm in each block wrong running statistics cost less").note
    assert "As a share of it they lose less too." in note  # "so that less can be lost" was all


def test_groups_by_the_rule_of_bgn() -> None:
    """The note on eight images names their number."""
    [claim] = [claim for claim in ALL if "eight images" in claim.text]
    assert f"{groups_for(8)} groups for eight images" in claim.note
