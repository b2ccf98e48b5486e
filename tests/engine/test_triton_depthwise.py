"""bnet and ubn with their convolution in the same kernels: the same as the generic path."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import normkit as nk
from cases import inputs

pytest.importorskip("triton", reason="Triton is not installed")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = {
    "bnet": nk.BNET(8),
    "bnet-wide": nk.BNET(70),
    "bnet-cumulative": nk.BNET(8, momentum=None),
    "ubn": nk.UBN(8),
    "ubn-wide": nk.UBN(70),
    "ubn-frozen": nk.UBN(8, tau=1.0),
    "ubn-uncentred": nk.UBN(8, centering=False),
    "ubn-always": nk.UBN(8, fct=False),
    "ubn-before": nk.UBN(8, gate="before"),
    "ubn-eval": nk.UBN(8).eval(),
}
FORMATS = ("contiguous", "channels_last")
BOTH = pytest.mark.parametrize("memory", FORMATS)
every_layer = pytest.mark.parametrize("name", CASES)


def layer_of(name):
    layer = copy.deepcopy(CASES[name]).to(DEVICE)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.uniform_(-0.5, 0.5)  # 1 + center_weight away from 0, where nothing is left
        layer.running_mean.uniform_(-0.5, 0.5)
        layer.running_var.uniform_(0.5, 1.5)
    return layer


def gradients(layer, x, grad):
    y = layer(x)
    return y, *torch.autograd.grad(y, [x, *layer.parameters()], grad)


# one is cut into rows, the last into strips of 7 and of 8
SIZES = [(5, 7), (1, 1), (1, 6), (17, 3), (2, 14), (2, 16)]
# every layer, and every form of a map with and without gates, in one and in two tiles of channels
FORMS = [
    *((name, size) for name in ("bnet", "ubn") for size in SIZES),
    *(("bnet-wide", SIZES[3]), ("ubn-wide", (2, 9))),  # the latter also in two tiles of columns
]
GRID = [
    *((name, (3, 4), FORMATS[i % 2]) for i, name in enumerate(CASES) if "wide" not in name),
    *((*form, memory) for form in FORMS for memory in FORMATS),
]


@pytest.mark.parametrize(("name", "size", "memory"), GRID)
def test_equal_to_the_generic_path(name, size, memory):
    """Output, every gradient, every buffer; against the torch backend in float64."""
    layer = layer_of(name)
    exact = copy.deepcopy(layer).double()
    x = inputs(3, size, memory, torch.float32, layer.channels).to(DEVICE)
    grad = torch.randn_like(x)
    with nk.use_backend("triton"):
        found = gradients(layer, x.requires_grad_(), grad)
    with nk.use_backend("torch"):
        truth = gradients(exact, x.detach().double().requires_grad_(), grad.double())
    assert found[0].stride() == x.stride()
    for mine, theirs in zip(found, truth, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-4, atol=1e-4)
    for mine, theirs in zip(layer.buffers(), exact.buffers(), strict=True):
        torch.testing.assert_close(mine.double(), theirs.double(), rtol=1e-5, atol=1e-6)


@BOTH
@pytest.mark.parametrize("name", ["bnet", "ubn"])
@pytest.mark.parametrize("activation", ["relu6", "leaky_relu"])
def test_what_follows_is_in_the_same_kernels(name, activation, memory):
    """A residual and an activation whose result tells its gradient: of x, of the residual and of
    every parameter, and through a second backward; against the torch backend in float64."""
    layer = layer_of(name)
    exact = copy.deepcopy(layer).double()
    x, residual, grad = (inputs(2, (3, 6), memory, torch.float32, 8).to(DEVICE) for _ in "xrg")

    def found(layer, x, residual, grad):
        x, residual = x.clone().requires_grad_(), residual.clone().requires_grad_()
        y = layer(x, residual, activation)
        first = torch.autograd.grad(y, [x, residual, *layer.parameters()], grad, retain_graph=True)
        (dx,) = torch.autograd.grad(y, x, grad, create_graph=True)
        return y, *first, torch.autograd.grad(dx.square().sum(), x)[0]

    with nk.use_backend("triton"):
        mine = found(layer, x, residual, grad)
    with nk.use_backend("torch"):
        theirs = found(exact, x.double(), residual.double(), grad.double())
    assert "FusedDepthwise" in mine[0].grad_fn.name()
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)


@every_layer
def test_it_is_the_fused_path(name, monkeypatch):
    def refuse(*args, **options):
        raise AssertionError("generic path")

    monkeypatch.setattr("normkit.layers.bnet.depthwise", refuse)
    monkeypatch.setattr("normkit.layers.ubn.depthwise", refuse)
    layer = layer_of(name)
    with nk.use_backend("triton"):
        layer(inputs(2, (2, 2), dtype=torch.float32, channels=layer.channels).to(DEVICE))


@every_layer
def test_the_backward_of_a_backward(name):
    layer = layer_of(name)
    twin = copy.deepcopy(layer)
    x = inputs(4, (3, 4), dtype=torch.float32, channels=layer.channels).to(DEVICE)
    grad = torch.randn_like(x)

    def penalty(layer):
        a, g = x.clone().requires_grad_(), grad.clone().requires_grad_()
        (first,) = torch.autograd.grad(layer(a), a, g, create_graph=True)
        return torch.autograd.grad(first.square().sum(), [a, g, layer.weight])

    with nk.use_backend("triton"):
        found = penalty(layer)
    with nk.use_backend("torch"):
        expected = penalty(twin)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3 * float(theirs.abs().max()))


@every_layer
def test_checkpointing_counts_once(name):
    layer = layer_of(name)
    twin = copy.deepcopy(layer)
    x = inputs(2, (2, 2), dtype=torch.float32, channels=layer.channels).to(DEVICE)
    with nk.use_backend("triton"):
        checkpoint(layer, x.clone().requires_grad_(), use_reentrant=False).sum().backward()
        twin(x)
    for mine, theirs in zip(layer.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def test_other_kernels_take_the_general_way():
    layer = nk.BNET(8, kernel_size=5).to(DEVICE)
    x = inputs(4, (6, 6), dtype=torch.float32).to(DEVICE)
    with nk.use_backend("triton"):
        assert "its convolution by torch, because" in nk.why(layer, x)
    twin = copy.deepcopy(layer)
    with nk.use_backend("triton"):
        found = layer(x)
    with nk.use_backend("torch"):
        torch.testing.assert_close(found, twin(x), rtol=1e-4, atol=1e-5)
