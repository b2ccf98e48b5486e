"""Whole networks beside torch's norms."""

import json

import pytest

from benchmarks import networks

pytest.importorskip("torchvision", reason="torchvision is not installed")


def test_a_small_case(tmp_path, monkeypatch, capsys):
    small = networks.Case("resnet18", 32, 2, ("torch-bn", "bn-fused", "gn-save"))
    monkeypatch.setattr(networks, "CASES", {"small": small})
    out = tmp_path / "networks.json"
    few = ["--turns", "1", "--steps", "1", "--warm-up", "1", "--device", "cpu"]
    assert networks.main([*few, "--networks", "small", "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["networks"]["small"]
    assert [row["variant"] for row in rows] == ["torch-bn", "bn-fused", "gn-save"]
    assert rows[0]["ratio"] == 1.0
    assert all(row["images_per_second"] > 0 and row["gib"] is None for row in rows)
    assert "| resnet18, 32 px | 2 | torch-bn |" in capsys.readouterr().out


def test_an_unknown_network(capsys):
    assert networks.main(["--networks", "resnet18", "--device", "cpu"]) == 2
    assert "resnet18-32" in capsys.readouterr().err
