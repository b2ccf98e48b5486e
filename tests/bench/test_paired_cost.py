"""The paired measurement finds a cost that is put in, and leaves out what slows both sides."""

from __future__ import annotations

import pytest

from benchmarks import paired_cost
from benchmarks.paired_cost import CostRatio, cost_of_observing, paired


def test_a_cost_of_one_part_in_a_hundred_is_seen_on_a_machine_that_slows_down() -> None:
    """Wall clocks gave −0.9 ± 1.2 % and +1.3 ± 1.5 % for one and the same thing."""
    now, calls = 0.0, 0

    def takes(seconds: float) -> None:
        nonlocal now, calls
        calls += 1
        now += seconds * (1 + calls / 1000)  # ever slower: half as fast again in the end

    cost = paired(lambda: takes(0.100), lambda: takes(0.101), 100, clock=lambda: now)
    assert cost.low <= 1.01 <= cost.high
    assert cost.high - cost.low < 0.002
    assert 0.100 < cost.seconds < 0.150


def test_the_two_parts_of_an_observation() -> None:
    measured = CostRatio(1.20, 1.10, 1.30, seconds=0.050)
    middle, low, high = cost_of_observing(measured, (10e-6, 5e-6, 15e-6), every=100)
    assert (middle, low, high) == pytest.approx((0.0022, 0.0011, 0.0033))


@pytest.mark.parametrize("option", ["fuse", "observe"])
def test_the_command(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    tiny = [option, "--model", "native:small_cnn", "--batch", "2", "--size", "8", "--turns", "2"]
    assert paired_cost.main(tiny) == 0
    printed = capsys.readouterr().out
    assert "95 %" in printed
    assert ("so at every=100: " in printed) == (option == "observe")


def test_a_model_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert paired_cost.main(["fuse", "--model", "native:resnet21", "--turns", "1"]) == 2
    assert "no model native:resnet21" in capsys.readouterr().err
