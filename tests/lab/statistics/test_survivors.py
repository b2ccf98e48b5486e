"""Runs that diverge or collapse are results: counted first, and survivors decide nothing."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace

import pytest

from lab.statistics.made_up import experiment, result, results
from normkit.lab.results import COLLAPSED, DIVERGED, DONE, Epoch, Result
from normkit.lab.statistics import compare

BASE = [0.90, 0.91, 0.92, 0.90, 0.91, 0.90, 0.92, 0.91, 0.90, 0.91]


def test_three_survivors_of_ten_are_not_better() -> None:
    """7 of 10 seeds diverged, and the verdict was "better", from the three that lived."""
    about = experiment("bn", "lucky", seeds=10)
    lucky = [None] * 7 + [0.951, 0.9405, 0.9505]
    (found,) = compare(about, results(about, {"bn": BASE, "lucky": lucky}))
    assert (found.verdict, found.diverged, found.pairs) == ("unstable", 7, 3)
    assert found.low > 0  # the comparison of the survivors is there
    assert math.isnan(found.p_difference_holm)


def test_a_seed_at_chance_level_is_not_training_noise() -> None:
    """bcn + ws without warm-up had 10 % on CIFAR-10 with one seed of three: it was averaged in."""
    about = experiment("bn", "bcn", seeds=3)
    (found,) = compare(about, results(about, {"bn": BASE[:3], "bcn": [0.93, 0.1, 0.94]}))
    assert (found.verdict, found.collapsed, found.diverged, found.pairs) == ("unstable", 1, 0, 2)
    assert found.mean == pytest.approx(0.935)


def test_survivors_decide_where_the_file_asks_for_it() -> None:
    about = experiment("bn", "lucky", seeds=10, losses="survivors")
    lucky = [None] * 7 + [0.951, 0.9405, 0.9505]
    (found,) = compare(about, results(about, {"bn": BASE, "lucky": lucky}))
    assert (found.verdict, found.diverged, found.pairs) == ("better", 7, 3)
    assert found.p_difference_holm == found.p_difference


@pytest.mark.parametrize("lost", [None, 0.1])
def test_a_loss_of_the_baseline_is_one_too(lost: float | None) -> None:
    about = experiment("bn", "bcn", seeds=5)
    (found,) = compare(about, results(about, {"bn": [lost, *BASE[1:5]], "bcn": [0.95] * 5}))
    assert found.verdict == "unstable"
    assert (found.lost, found.baseline_lost) == (0, 1)


def test_what_is_unstable_does_not_shield_the_others() -> None:
    """It counts in Holm's correction, and cannot be shown itself."""
    about = experiment("bn", "a", "b", seeds=5)
    better = [each + d for each, d in zip(BASE, [0.02, 0.03, 0.02, 0.03, 0.02], strict=False)]
    known = results(about, {"bn": BASE[:5], "a": better, "b": [None, *better[1:]]})
    a, b = compare(about, known)
    assert (a.verdict, b.verdict) == ("better", "unstable")
    assert a.p_difference_holm == pytest.approx(2 * a.p_difference)


def test_simulated_experiments_with_losses_never_have_a_verdict() -> None:
    chance = random.Random(3)
    about = experiment("bn", "bcn", seeds=8)
    words = []
    for _ in range(150):
        scores: dict[str, list[float | None]] = {
            name: [0.1 if chance.random() < 0.05 else chance.gauss(0.9, 0.01) for _ in range(8)]
            for name in ("bn", "bcn")
        }
        (found,) = compare(about, results(about, scores))
        lost = sum(score == 0.1 for each in scores.values() for score in each)
        assert found.lost + found.baseline_lost == lost
        assert (found.verdict == "unstable") == (lost > 0)
        words.append(found.verdict)
    assert 60 < words.count("unstable") < 110  # 1 − 0.95¹⁶ = 56 % of 150


def one(accuracy: float, **more: object) -> Result:
    epoch = Epoch(1, test_accuracy=accuracy, test_top5_accuracy=min(1.0, 5 * accuracy))
    fields = {"classes": 10, "test_samples": 10_000, **more}
    return Result("id", DONE, (1,), (epoch,), 1.0, 1, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("accuracy", "samples", "outcome"),
    [
        (0.1, 10_000, COLLAPSED),
        (0.02, 10_000, COLLAPSED),
        (0.108, 10_000, COLLAPSED),  # 3 standard errors are 0.009
        (0.112, 10_000, DONE),
        (0.14, 360, COLLAPSED),
        (0.16, 360, DONE),
        (0.20, 10, DONE),  # so few samples cannot tell; a tenth of the way to 1 is the limit
    ],
)
def test_chance_level(accuracy: float, samples: int, outcome: str) -> None:
    assert one(accuracy, test_samples=samples).outcome("accuracy") == outcome
    assert one(accuracy, test_samples=samples).outcome("error") == outcome


def test_one_answer_for_everything_is_a_collapse_however_often_it_is_right() -> None:
    """70 % of the samples may be of one class: that is no accuracy."""
    plain = one(0.7, classes=2)
    assert plain.outcome("accuracy") == DONE
    dead = replace(plain, epochs=(replace(plain.epochs[0], test_one_class=1.0),))
    assert dead.outcome("accuracy") == COLLAPSED
    assert dead.collapse() == "the same answer to every test sample, 70.0% of them right"


def test_results_of_earlier_releases() -> None:
    """They know neither the classes nor the answers: 1/K and 5/K tell one answer for all."""
    old = {"classes": None, "test_samples": None}
    assert one(0.1, **old).outcome("accuracy") == COLLAPSED
    assert one(0.01, **old).outcome("accuracy") == COLLAPSED
    assert one(0.11, **old).outcome("accuracy") == DONE
    trained = result("id", 0.91)
    record = json.loads(trained.to_json())
    for new in ("classes", "test_samples", "provenance", "collapsed", "pictures"):
        del record[new]
    for epoch in record["epochs"]:
        for new in ("test_one_class", "metrics", "units"):
            del epoch[new]
    read = Result.from_json(json.dumps(record))
    assert read.outcome("accuracy") == DONE


def test_what_diverged_did_not_collapse() -> None:
    assert result("id", None).outcome("accuracy") == DIVERGED
    assert result("id", None).collapse() == ""
    assert replace(one(0.9), epochs=(Epoch(1, test_accuracy=0.9, test_loss=math.inf),)).outcome(
        "loss"
    ) == (DIVERGED)


@pytest.mark.parametrize(
    ("majority", "one_class", "accuracy", "outcome"),
    [
        (0.9, 0.997, 0.901, COLLAPSED),  # two classes, and nearly one answer: it counted as done
        (0.9, 0.91, 0.97, DONE),
        (0.99, 0.991, 0.999, DONE),  # nearly all are of one class, and the network tells the others
        (0.9, 0.994, 0.906, DONE),  # few of the others are found, but all answers are right
    ],
)
def test_the_most_frequent_class_for_all_is_a_collapse(
    majority: float, one_class: float, accuracy: float, outcome: str
) -> None:
    last = Epoch(
        1, test_accuracy=accuracy, test_one_class=one_class, test_majority=majority, test_loss=1.0
    )
    data = {"classes": 2, "test_samples": 100_000}
    made = Result("r", DONE, (1,), (last,), seconds=1.0, parameters=1, **data)  # type: ignore[arg-type]
    assert made.outcome("accuracy") == outcome
