"""Outputs that kernels make again are those that they made."""

import copy

import pytest
import torch
from torch import nn

import normkit as nk
from cases import CHANNELS
from normkit.engine import remaking

pytest.importorskip("triton", reason="Triton is not installed")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("name", nk.names("activation"))
def test_every_layer_on_kernels(name, monkeypatch):
    torch.manual_seed(0)
    layer = nk.make(name, CHANNELS).to(DEVICE)
    conv = nn.Conv2d(CHANNELS, 2, 1).to(DEVICE)
    x = torch.randn(2, CHANNELS, 3, 3, device=DEVICE)
    offered = []
    first = remaking.offer
    monkeypatch.setattr(
        remaking, "offer", lambda y, *how: offered.append(y.data_ptr()) or first(y, *how)
    )

    def gradients(saves):
        own, after, given = copy.deepcopy(layer), copy.deepcopy(conv), x.clone().requires_grad_()
        seen = []
        with nk.use_backend("triton"):
            if saves:
                with remaking.Remaking():
                    y = own(given)
                    loss = after(y).square().sum()
                seen = [y.data_ptr() in offered]
            else:
                loss = after(own(given)).square().sum()
            return torch.autograd.grad(loss, [given, *after.parameters()]), seen

    (found, made), (expected, _) = gradients(True), gradients(False)
    assert made == [True], "its output is not offered"
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)
