"""The benchmark of the loop runs, and says what it measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import training_loop as lab

TINY = ["--device", "cpu", "--data", "synthetic:1x8x8x3x40", "--model", "native:small_cnn"]
TINY += ["--stem", "own", "--crop", "1", "--epochs", "1", "--batch", "16"]
TINY += ["--precision", "float32", "--norms", "torch,gn", "--abreast", "1,2"]


def test_every_way_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "lab.json"
    assert lab.main([*TINY, "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    ways = [(lab.BARE, 1), (lab.DIRECT, 1), (lab.RECORDED, 1), (lab.DIRECT, 2)]
    assert [(r["norm"], r["way"], r["runs"]) for r in rows] == [
        (norm, *way) for norm in ("torch", "gn") for way in ways
    ]
    assert all((r["seconds"] is None) == (r["way"] == lab.RECORDED) for r in rows)
    assert all(r["seconds"] > 0 for r in rows if r["seconds"] is not None)
    printed = capsys.readouterr().out
    assert "only on a GPU" in printed
    assert "1 side by side" in printed
    assert list(tmp_path.iterdir()) == [out]


def test_a_data_set_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert lab.main([*TINY, "--data", "cifar01"]) == 2
    assert "cifar10" in capsys.readouterr().err


def test_counts_of_runs_are_positive() -> None:
    with pytest.raises(SystemExit):
        lab.main([*TINY, "--abreast", "0"])
