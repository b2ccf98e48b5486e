"""Weight standardization in one kernel: the same as the expression, in every variant."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import normkit as nk
from normkit.engine import dispatch, special

pytest.importorskip("triton", reason="Triton is not installed")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("variant", ["paper", "ws", "bcn", "timm"])
@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
def test_equal_to_the_expression(variant, memory):
    conv = nn.Conv2d(5, 7, 3).to(DEVICE)
    conv.weight.data = conv.weight.data.to(memory_format=memory)
    twin = copy.deepcopy(conv).double()
    for module in (conv, twin):
        nk.WS.attach(module, variant=variant)
    grad = torch.randn(7, 5, 3, 3, device=DEVICE)
    with nk.use_backend("triton"):
        found = conv.weight
        mine = torch.autograd.grad(found, conv.parametrizations.weight.original, grad)
    assert found.grad_fn.name().startswith("_Filters")
    assert found.stride() == conv.parametrizations.weight.original.stride()
    truth = twin.weight
    theirs = torch.autograd.grad(truth, twin.parametrizations.weight.original, grad.double())
    torch.testing.assert_close(found.double(), truth, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(mine[0].double(), theirs[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("outside", [False, True])
def test_the_backward_of_a_backward(outside):
    weight = torch.randn(4, 3, 3, device=DEVICE, requires_grad=True)
    grad = torch.randn(4, 3, 3, device=DEVICE, requires_grad=True)

    def penalty(of):
        (first,) = torch.autograd.grad(of, weight, grad, create_graph=True)
        return torch.autograd.grad(first.square().sum(), [weight, grad])

    with nk.use_backend("triton"):
        found = penalty(special.standardized_filters(weight, 9, 1e-3, outside))
    apart = weight - weight.mean((1, 2), keepdim=True)
    square = apart.square().sum((1, 2), keepdim=True) / 9
    expected = penalty(apart / (square.sqrt() + 1e-3 if outside else (square + 1e-3).sqrt()))
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


def test_filters_of_one_size_only():
    """Too long for registers, or a single weight: the general way."""
    with nk.use_backend("triton"):
        for shape in ((2, dispatch.LONGEST + 1), (2, 1, 1, 1)):
            assert special.standardized_filters(torch.randn(shape), 9, 1e-5, False) is None
