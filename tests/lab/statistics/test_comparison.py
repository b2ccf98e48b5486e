"""From results to comparisons, and how soon a run is as good as the baseline."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import asdict

import pytest

from lab.statistics.made_up import experiment, result, results, variant
from normkit.errors import OptionError
from normkit.lab.experiment import Run
from normkit.lab.results import DONE, Comparison, Epoch, Result
from normkit.lab.statistics import (
    compare,
    effect,
    interval,
    more_seeds,
    paired_t,
    reach,
    sign_flip,
    tost,
    two_sided,
)
from normkit.lab.statistics.comparison import median_reach

BN = [0.90, 0.91, 0.92, 0.90, 0.91]
BCN = [0.92, 0.94, 0.93, 0.92, 0.94]


def only(found: list[Comparison]) -> Comparison:
    (comparison,) = found
    return comparison


def test_every_number_of_a_comparison() -> None:
    about = experiment("bn", "bcn", seeds=5)
    found = only(compare(about, results(about, {"bn": BN, "bcn": BCN})))
    better = [a - b for a, b in zip(BCN, BN, strict=True)]
    assert (found.variant, found.baseline, found.cell, found.pairs) == ("bcn", "bn", (), 5)
    assert (found.mean, found.baseline_mean) == pytest.approx((0.93, 0.908))
    assert (found.std, found.baseline_std) == pytest.approx((0.01, 0.0083666), abs=1e-7)
    assert found.difference == pytest.approx(0.022)
    assert (found.low, found.high) == pytest.approx(interval(better), abs=1e-12)
    assert found.effect == pytest.approx(effect(better))
    assert (found.p_better, found.p_worse) == pytest.approx(paired_t(BCN, BN))
    assert found.p_difference == found.p_difference_holm == pytest.approx(two_sided(better))
    assert found.alpha == 0.05
    assert found.p_sign_flip == sign_flip(better)
    assert found.p_equivalent == pytest.approx(tost(better, 0.005))
    assert (found.verdict, found.more_seeds) == ("better", None)
    assert (found.diverged, found.baseline_diverged) == (0, 0)
    assert (found.epochs_to_baseline, found.seconds_to_baseline) == (2.0, 20.0)


@pytest.mark.parametrize("metric", ["error", "loss"])
def test_positive_is_better_whatever_the_metric(metric: str) -> None:
    about = experiment("bn", "bcn", seeds=5, metric=metric)
    found = only(compare(about, results(about, {"bn": BN, "bcn": BCN})))
    assert found.mean == pytest.approx(0.07)
    assert found.difference == pytest.approx(0.022)
    assert found.low > 0
    assert (found.verdict, found.epochs_to_baseline) == ("better", 2.0)


def test_the_other_verdicts() -> None:
    about = experiment("bn", "worse", "same", "unclear", seeds=5)
    wild = [0.99, 0.80, 0.95, 0.85, 0.99]
    same = [a + b for a, b in zip(BCN, [0.001, -0.001, 0.0, 0.0005, 0.0], strict=True)]
    scores = {"bn": BCN, "worse": BN, "same": same, "unclear": wild}
    found = {each.variant: each for each in compare(about, results(about, scores))}
    assert {name: each.verdict for name, each in found.items()} == {
        "worse": "worse",
        "same": "equivalent",
        "unclear": "not shown",
    }
    assert (found["unclear"].more_seeds or 0) > 5
    assert found["same"].more_seeds is None
    assert found["worse"].epochs_to_baseline is None


def test_holm_over_variants_and_cells() -> None:
    cells = [(("train.batch", 2),), (("train.batch", 64),)]
    about = experiment("bn", "a", "b", seeds=5, cells=cells)
    close = [x + d for x, d in zip(BN, [0.01, 0.02, -0.002, 0.02, 0.01], strict=True)]
    known: dict[str, Result] = {}
    for cell in cells:
        known |= results(about, {"bn": BN, "a": close, "b": BCN}, cell)
    found = compare(about, known)
    assert [(each.variant, each.cell) for each in found] == [
        (name, cell) for cell in cells for name in ("a", "b")
    ]
    weak, strong = found[0], found[1]
    assert weak.p_difference <= 0.05 < weak.p_difference_holm
    # Holm shows both strong ones, tested with a fourth of the 5 % since they are equal, and stops
    assert strong.p_difference_holm == pytest.approx(4 * strong.p_difference)
    assert weak.p_difference_holm == pytest.approx(2 * weak.p_difference)
    assert (weak.verdict, strong.verdict) == ("not shown", "better")
    assert (weak.alpha, strong.alpha) == (0.05 / 2, 0.05 / 4)
    better = [a - b for a, b in zip(BCN, BN, strict=True)]
    assert (strong.low, strong.high) == interval(better, strong.alpha)


def test_more_seeds_allow_for_holm() -> None:
    about = experiment("bn", "better", "a bit worse", "as unclear", seeds=5)
    wild = [x + d for x, d in zip(BN, [-0.05, 0.03, -0.06, 0.01, -0.02], strict=True)]
    known = results(about, {"bn": BN, "better": BCN, "a bit worse": wild, "as unclear": wild})
    found = compare(about, known)[1]
    differences = [a - b for a, b in zip(wild, BN, strict=True)]
    # one is shown, and two are left
    assert found.alpha == 0.025
    assert found.more_seeds == more_seeds(differences, 0.005, alpha=0.025)
    assert found.more_seeds != more_seeds(differences, 0.005, alpha=0.05)


def test_only_seeds_that_both_finished() -> None:
    about = experiment("bn", "bcn", seeds=5)
    scores = {"bn": [0.2, *BN[1:]], "bcn": [None, *BCN[1:4]]}
    found = only(compare(about, results(about, scores)))
    assert (found.pairs, found.diverged, found.baseline_diverged) == (3, 1, 0)
    assert found.baseline_mean == pytest.approx(0.91)
    assert found.mean == pytest.approx(0.93)


def test_divergences_are_counted_apart() -> None:
    about = experiment("bn", "bcn", seeds=5)
    scores = {"bn": [None, None, 0.9, 0.91, 0.92], "bcn": [0.9, None, 0.93, 0.92, math.nan]}
    found = only(compare(about, results(about, scores)))
    assert (found.pairs, found.diverged, found.baseline_diverged) == (2, 2, 2)


@pytest.mark.parametrize("finished", [0, 1])
def test_too_few_pairs_say_so(finished: int) -> None:
    about = experiment("bn", "bcn", seeds=5)
    found = only(compare(about, results(about, {"bn": BN, "bcn": BCN[:finished]})))
    assert (found.pairs, found.verdict, found.more_seeds) == (finished, "not shown", None)
    unknown = {name for name, value in asdict(found).items() if value != value}
    tests = {name for name in asdict(found) if name.startswith("p_")}
    expected = tests | {"std", "baseline_std", "low", "high", "effect"}
    if not finished:
        expected |= {"mean", "baseline_mean", "difference"}
    assert unknown == expected


def test_nothing_to_compare() -> None:
    about = experiment("bn", seeds=3)
    assert compare(about, {}) == []


def test_the_same_run_under_two_names_is_not_better() -> None:
    about = experiment("bn", "bcn", seeds=6)
    six = [*BN, 0.9]
    found = only(compare(about, results(about, {"bn": six, "bcn": six})))
    assert (found.difference, found.verdict) == (0.0, "equivalent")
    assert (found.p_better, found.p_worse) == (1.0, 1.0)


def test_a_variant_without_a_baseline() -> None:
    cell = (("train.batch", 2),)
    about = experiment("bn", seeds=3)
    lonely = type(about)(**{**vars(about), "variants": (*about.variants, variant("bcn", cell))})
    with pytest.raises(OptionError, match=r"'bcn' has nothing to be compared with.*'train.batch'"):
        compare(lonely, {})


def test_results_of_other_experiments_do_not_matter() -> None:
    about = experiment("bn", "bcn", seeds=5)
    known = results(about, {"bn": BN, "bcn": BCN})
    other = Run(variant("gn").setting, 1)
    assert compare(about, {**known, other.id: result(other.id, 0.1)}) == compare(about, known)


def test_without_scipy_it_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['scipy'] = None\n"
        "from normkit.lab.statistics import paired_t\n"
        "paired_t([1, 2], [0, 0.5])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 1
    assert "pip install 'normkit[lab]'" in ran.stderr


def curve(*accuracies: float | None) -> Result:
    """A run that takes 10 seconds an epoch; None: not evaluated."""
    epochs = tuple(
        Epoch(
            number,
            test_accuracy=accuracy,
            test_top5_accuracy=accuracy,
            test_loss=None if accuracy is None else 1 - accuracy,
            seconds=10.0 * number,
        )
        for number, accuracy in enumerate(accuracies, start=1)
    )
    return Result("id", DONE, (len(epochs),), epochs, seconds=99.0, parameters=1)


def test_the_first_epoch_that_is_as_good() -> None:
    run = curve(0.5, 0.75, 0.625, 0.875)
    for metric in ("accuracy", "top5_accuracy"):
        assert reach(run, 0.75, metric) == (2, 20.0)
        assert reach(run, 0.76, metric) == (4, 40.0)
        assert reach(run, 0.9, metric) is None


@pytest.mark.parametrize("metric", ["error", "loss", "top5_error"])
def test_where_less_is_better(metric: str) -> None:
    run = curve(0.5, 0.75, 0.625, 0.875)
    assert reach(run, 0.25, metric) == (2, 20.0)
    assert reach(run, 0.1, metric) is None


def test_what_was_not_evaluated_or_trained_does_not_count() -> None:
    assert reach(curve(None, None, 0.9), 0.5, "accuracy") == (3, 30.0)
    before = Result("id", DONE, (1,), (Epoch(0, test_accuracy=0.9),), seconds=1.0, parameters=1)
    assert reach(before, 0.5, "accuracy") is None


def test_the_median_of_runs_with_targets_of_their_own() -> None:
    runs = [curve(0.5, 0.75, 0.875)] * 3
    assert median_reach(runs, [0.5, 0.75, 0.9], "accuracy") == (2.0, 20.0)
    assert median_reach(runs, [0.5, 0.9, 0.9], "accuracy") is None
    assert median_reach([], [], "accuracy") is None
