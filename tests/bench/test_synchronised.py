"""The forecast of docs/distributed.md."""

from __future__ import annotations

import pytest

from benchmarks import synchronised


def test_volume_and_time_are_those_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert synchronised.volume([64]) == (8 * 129, 4 * 128)
    assert synchronised.main(["forecast", "--step-ms", "42.8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("53 norms, 26,560 channels: 425 kB forward and 212 kB backward")
    assert lines[-1].split() == ["1024", "10.65", "80.1%"]


def test_its_network_is_a_resnet_18() -> None:
    network = synchronised.resnet18()
    assert sum(p.numel() for p in network.parameters()) == 11_689_512  # as torchvision's
    channels = [m.channels for m in network.modules() if hasattr(m, "channels")]
    assert (len(channels), sum(channels)) == (20, 4800)
