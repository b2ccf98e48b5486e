"""What a warm-up is worth: the table, what is drawn from it, and what layers say of it."""

from __future__ import annotations

import inspect
import re
import statistics

import pytest

import normkit as nk
from tools.evidence.evidence import Evidence
from tools.evidence.schedule import (
    BOTTLENECKS,
    RESNET18,
    SMALL,
    Gain,
    advice_on_warmup,
    gains_of_warmup,
    warmup_gains,
)


@pytest.fixture(scope="module")
def evidence() -> Evidence:
    return Evidence()


@pytest.fixture(scope="module")
def gains(evidence: Evidence) -> dict[tuple[str, str], Gain]:
    return {(each.norm, each.network): each for each in warmup_gains(evidence)}


def points(gain: Gain) -> float:
    return 100 * statistics.fmean(gain.gaps)


def paired(evidence: Evidence, file: str, one: str, other: str, **cell: float) -> list[float]:
    """Mean differences in points, schedule by schedule."""
    found = []
    experiment = evidence.pooled(file)
    for warmup in (0.0, 1.0):
        wanted = {"train.warmup": warmup, **{f"train.{k}": v for k, v in cell.items()}}
        scores = [
            {
                run.seed: evidence.pool[run.id].score("accuracy")
                for run in each.runs(experiment.seeds)
                if run.id in evidence.pool
            }
            for name in (one, other)
            for each in experiment.variants
            if each.name == name and dict(each.cell) == wanted
        ]
        found.append(100 * statistics.fmean(scores[0][s] - scores[1][s] for s in scores[0]))
    return found


def text_of(layer: type) -> str:
    return " ".join(inspect.cleandoc(layer.__doc__ or "").split())


def test_pairs_are_of_one_norm_in_one_network_with_and_without(gains: dict) -> None:
    """Neither page said that plain batch norm loses most without warm-up."""
    assert len(gains["bn", SMALL].gaps) == 15
    assert points(gains["bn", RESNET18]) == pytest.approx(4.70, abs=0.01)
    assert points(gains["bn", BOTTLENECKS]) == pytest.approx(12.13, abs=0.01)
    assert points(gains["bn, 2 a worker", RESNET18]) == pytest.approx(7.61, abs=0.01)
    assert points(gains["γ 0.1, c 100 (a)", SMALL]) < -1
    assert points(gains["γ 1 (a)", SMALL]) > 1
    assert gains["bcn + ws, micro", RESNET18].lost == ((5, 5), (0, 5))


def test_the_table_and_the_sentence(evidence: Evidence) -> None:
    table = "\n".join(gains_of_warmup(evidence))
    [bn] = re.findall(r"^\| bn \|.*$", table, flags=re.MULTILINE)
    assert re.fullmatch(
        r"\| bn \| \+0\.\d\d \(.*\), not shown, n 15 "
        r"\| \+4\.70 \(\+3\.11 to \+6\.28\), better, n 5 \| \+12\.13 \(.*\), better, n 5 \|",
        bn,
    )
    assert "| bcn + ws, micro | -0.84" in table
    assert "| 5 of 5 lost without |" in table
    text = " ".join(advice_on_warmup(evidence))
    assert text.index(f"in a {BOTTLENECKS} +12.13") < text.index(f"in a {RESNET18} +4.70")


def test_bn_says_what_warmup_and_its_start_scale_are_worth(evidence: Evidence, gains: dict) -> None:
    text = text_of(nk.BN)
    large, bottlenecks = (f"{points(gains['bn', each]):.0f}" for each in (RESNET18, BOTTLENECKS))
    assert f"{large} points in a ResNet-18, {bottlenecks} in one of bottlenecks and under 1" in text
    assert points(gains["bn", SMALL]) < 1
    few, many = sorted(
        -gap for gap in paired(evidence, "a-small-start-scale", "γ 0.1, c 100", "γ 1")
    )
    assert f"it cost the ResNet-20 {few:.0f} to {many:.0f} points" in text
    cold, warm = paired(evidence, "a-resnet18", "γ 0.1, c 100", "γ 1")
    assert f"gained {cold:.0f} in a ResNet-18 without warm-up alone" in text
    assert abs(warm) < 0.5


def test_group_norms_over_batches_say_what_warmup_is_worth(evidence: Evidence, gains: dict) -> None:
    few = [points(gains[f"bgn, {size} a worker", SMALL]) for size in (1, 2)]
    assert f"worth {min(few):.0f} to {max(few):.0f} points in a ResNet-20" in text_of(nk.BGN)
    own = [points(gains[name, SMALL]) for name in ("gbgn", "gbgn, 2 a worker", "gbgn, 1 a worker")]
    text = text_of(nk.GBGN)
    assert f"worth {min(own):.0f} to {max(own):.0f} points in a ResNet-20" in text
    ahead = paired(evidence, "m-worker-batch", "gbgn", "bgn", worker_batch=2)
    assert f"beat by {min(ahead):.0f} to {max(ahead):.0f} points with two images" in text


def test_gn_says_what_ws_is_worth(evidence: Evidence) -> None:
    """14.61 was rounded to 14."""
    ahead = paired(evidence, "l-ws-bcn", "gn + ws", "gn")
    assert f"worth {min(ahead):.0f} to {max(ahead):.0f} points" in text_of(nk.GN)
