"""What a fit costs, in calls: at most four forwards of the network on its images.

With the weights of other layers it is two fits, with and without, of which the better is kept.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import normkit as nk

IMAGES = 40


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
    ).eval()  # fmt: skip


@pytest.mark.parametrize(
    ("target", "options", "settings"),
    [
        ("gn", {"groups": 1}, {}),
        ("gn", {"groups": "fit"}, {}),  # six candidates a norm, and not one forward more
        ("bcn", {"groups": 4}, {}),
        ("dyt", {}, {}),
        ("gn", {"groups": 1}, {"parameters": "all"}),
        ("gn", {"groups": 1}, {"standardize": "ws"}),
    ],
)
def test_images_through_each_convolution(
    target: str, options: dict[str, Any], settings: dict[str, Any]
) -> None:
    """Both networks once, the carried one on what is held out, and two images to look around and
    to measure before and after."""
    model = network()
    counts: dict[str, int] = {}
    for path, layer in model.named_modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):

            def count(module: nn.Module, args: Any, path: str = path) -> None:
                counts[path] = counts.get(path, 0) + len(args[0])

            layer.register_forward_pre_hook(count)
    images = torch.randn(IMAGES, 3, 8, 8)
    plan = nk.plan_conversion(model, target, fit=nk.Fit(images, **settings), **options)
    assert plan.fit is not None
    planned = dict(counts)
    plan.apply()
    assert len(planned) == 3
    # to look around: two images, twice where it also has to be seen what feeds what
    fits = 2 if "parameters" in settings else 1
    assert max(planned.values()) <= 2 * IMAGES * fits + plan.fit.held_out + 2 * 2
    assert fits > 1 or max(counts.values()) <= 4 * IMAGES


def test_alpha_is_chosen_without_many_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """It took tanh of all values of a layer for each of up to thirteen numbers, in double
    precision, and a fit of EfficientNet-Lite0 as long as 25 forwards."""
    channels, values = 4, 1 << 14
    x = 3 * torch.randn(values, channels, dtype=torch.float64) + 5
    computed = []
    tanh = torch.tanh

    def counted(y: Tensor) -> Tensor:
        computed.append(y.numel())
        return tanh(y)

    monkeypatch.setattr(torch, "tanh", counted)
    layer = nk.DyT(channels)
    assert layer.prepare_fit(x, 2 * x - 1) == ("alpha",)
    assert sum(computed) < x.numel()
    # what the next power of two would lose is too much, what this one loses is not
    monkeypatch.undo()
    target = 2 * (x - x.mean(0))

    def lost(alpha: Tensor) -> float:
        y = torch.tanh(alpha * x)
        y = y - y.mean(0)
        line = (y * target).sum(0) / y.square().sum(0) * y
        return float((target - line).square().sum() / target.square().sum())

    alpha = layer.alpha.detach().double()
    assert lost(alpha) < 0.03  # 0.02 of the values it is chosen by, which are some of these
    assert lost(2 * alpha) > 0.02
