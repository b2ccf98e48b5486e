"""Numbers and settings in words."""

from __future__ import annotations

import math

import pytest

from normkit.lab.report.words import Metric, cell_words, value_words
from normkit.lab.results import METRICS
from normkit.reporting.text import NONE, counted, duration, listed, memory, probability

ACCURACY, ERROR, LOSS = (Metric(name, METRICS[name]) for name in ("accuracy", "error", "loss"))


def test_accuracy_is_in_percent_and_loss_is_not() -> None:
    assert ACCURACY.spread(0.9432, 0.0012) == "94.32 ± 0.12"
    assert ERROR.spread(0.0568, None) == "5.68"
    assert LOSS.spread(0.51234, 0.0041) == "0.512 ± 0.004"


@pytest.mark.parametrize("nothing", [None, math.nan, math.inf])
def test_what_is_not_known_is_a_dash(nothing: float | None) -> None:
    assert ACCURACY.plain(nothing) == NONE
    assert ACCURACY.spread(nothing, 0.1) == NONE
    assert ACCURACY.spread(0.5, nothing) == "50.00"
    assert probability(nothing) == duration(nothing) == memory(nothing) == NONE


def test_a_difference_says_which_way_is_better() -> None:
    assert ACCURACY.difference(0.031, 0.022, 0.040) == "+3.1 points"
    assert ACCURACY.difference(-0.031, -0.040, -0.022) == "−3.1 points"
    # for error and loss the sign would mislead: positive is better, and that is less of it
    assert ERROR.difference(0.031, 0.022, 0.040) == "error 3.1 points lower"
    assert ERROR.difference(-0.031, -0.040, -0.022) == "error 3.1 points higher"
    assert LOSS.difference(0.031, 0.022, 0.040) == "loss 0.031 lower"


def test_digits_follow_the_width_of_the_interval() -> None:
    assert ACCURACY.interval(0.022, 0.040) == "2.2 to 4.0"  # 1.8 points wide
    assert ACCURACY.interval(0.0311, 0.0333) == "3.11 to 3.33"  # 0.22 points wide
    assert ACCURACY.interval(0.12, 0.45) == "12.0 to 45.0"
    # "−1.4 to 0.0" stood beside the verdict "worse"
    assert ACCURACY.interval(-0.0141, -0.0004) == "−1.41 to −0.04"


def test_zero_has_no_sign() -> None:
    assert ACCURACY.plain(-0.000001, sign=True) == "0.00"
    assert ACCURACY.plain(0.000001, sign=True) == "0.00"
    assert ACCURACY.plain(-0.01, sign=True) == "−1.00"


def test_cells_are_said_as_one_would() -> None:
    assert cell_words((("train.worker_batch", 1),)) == "1 sample a worker"
    assert cell_words((("train.worker_batch", None),)) == "the whole batch on one worker"
    assert cell_words((("train.lr", 0.1), ("norm.groups", 4))) == "learning rate 0.1, 4 groups"
    assert cell_words((("train.weight_decay", 0.0001),)) == "weight decay 0.0001"
    assert cell_words((("data.name", "{}"),)) == "{}"
    assert cell_words(()) == ""


def test_values_are_short() -> None:
    assert value_words("torchvision:resnet18") == "resnet18"
    assert value_words("mine.nets:small") == "mine.nets:small"
    assert value_words({"groups": 8, "affine": True}) == "groups=8, affine=yes"
    assert value_words((30, 60)) == "30, 60"
    assert value_words(()) == value_words(None) == "none"


def test_lists_and_counts() -> None:
    assert listed(["a"]) == "a"
    assert listed(["a", "b", "c"]) == "a, b and c"
    assert listed(range(1, 12), most=4) == "1, 2, 3 and 8 more"
    assert (counted(1, "seed"), counted(2000, "run")) == ("1 seed", "2,000 runs")


def test_sizes_and_times() -> None:
    assert memory(0) == "0 B"
    assert memory(3 * 2**20) == "3 MiB"
    assert memory(80 * 2**30) == "80 GiB"
    assert (duration(61), duration(600), duration(3600), duration(90000)) == (
        "61 s",
        "10 min",
        "1 h",
        "25 h",
    )
    assert (probability(0.00001), probability(0.0432), probability(0.51)) == (
        "< 0.001",
        "0.043",
        "0.51",
    )
