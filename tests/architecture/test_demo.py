"""The demo runs, is fair to both sides, and says what to install when it cannot run."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from normkit import catalog, demo


def test_it_shows_the_catalog_and_both_results(capsys: pytest.CaptureFixture[str]) -> None:
    demo.main(epochs=1)
    said = capsys.readouterr().out
    words = said.split()
    assert [name for name in catalog.ENTRIES if name not in words] == []
    assert "nn.BatchNorm2d" in words
    assert "normkit.UBN" in words


def test_it_trains() -> None:
    digits = demo.load_digits()
    ticks: list[None] = []
    result = demo.train(
        "bn", demo.network(nn.BatchNorm2d), digits, epochs=2, tick=lambda: ticks.append(None)
    )
    assert len(ticks) == 2 * demo.batches(digits)
    assert result.accuracy > 0.5  # chance is 0.1


def test_nothing_is_both_trained_and_tested_on() -> None:
    (trained, _), (tested, _) = demo.load_digits()
    assert len(trained) + len(tested) == 1797
    assert not (trained.flatten(1)[:, None] == tested.flatten(1)).all(2).any()


def test_both_networks_start_from_the_same_convolutions() -> None:
    def greedy(channels: int) -> nn.Module:
        torch.rand(7)  # a norm that draws random numbers when it is made
        return nn.BatchNorm2d(channels)

    one, other = demo.network(nn.BatchNorm2d), demo.network(greedy)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("missing", ["rich", "sklearn"])
def test_it_names_the_extra(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; from normkit import demo; demo.main()"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 1
    assert ran.stderr.strip() == (f"The demo needs {missing}. Try: pip install 'normkit[lab]'")
