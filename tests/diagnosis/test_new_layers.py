"""Layers that nobody has trained yet give no alarm."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import normkit as nk
from normkit import catalog
from normkit.diagnosis.diagnose import diagnose


def kinds(model: nn.Module, loader: Any) -> dict[str, str]:
    """The severity of each kind that was found."""
    return {f.kind: f.severity for f in diagnose(model, loader, attribution=None)}


@pytest.mark.parametrize("way", ["made", "converted"])
@pytest.mark.parametrize("name", [n for n in catalog.names("activation") if n != "frozen_bn"])
def test_a_new_layer_is_no_alarm(name: str, way: str) -> None:
    """Kernels and biases that are drawn, and scales that make up for a gate, looked trained."""
    if way == "made":
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nk.make(name, 8), nn.ReLU())
    else:
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        nk.convert(model, name)
    found = kinds(model, [torch.randn(16, 3, 8, 8) + 1 for _ in range(3)])
    assert not {kind for kind, severity in found.items() if severity != "note"}


@pytest.mark.parametrize("name", ["ubn", "bnet"])
def test_a_kernel_that_was_trained_does_not_look_new(name: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nk.make(name, 8), nn.ReLU())
    with torch.no_grad():
        model[1].weight *= 1.5
    assert "lost-statistics" in kinds(model, [torch.randn(16, 3, 8, 8) + 1 for _ in range(3)])


def test_small_variances_of_new_weights_are_no_alarm() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 1, bias=False), nn.BatchNorm2d(8))
    with torch.no_grad():
        model[0].weight *= 1e-4
    data = [torch.randn(16, 3, 8, 8) for _ in range(3)]
    assert set(kinds(model, data)) == {"untrained"}
    for x in data * 30:
        model(x)
    assert "eps-dominates" in kinds(model, data)
