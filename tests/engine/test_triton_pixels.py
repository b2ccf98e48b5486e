"""Positional normalization in one pass each way: the same as the generic path."""

from __future__ import annotations

import copy

import pytest
import torch

import normkit as nk
from cases import inputs
from normkit.errors import OptionError

pytest.importorskip("triton", reason="Triton is not installed")
from normkit.engine.families import pixel
from normkit.engine.triton import forms
from normkit.engine.triton import passes as triton_passes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = {
    "affine": nk.PN(11),
    "plain": nk.PN(16, affine=False),
    "unbiased": nk.PN(9, unbiased=True),
    "two": nk.PN(2, eps=0.1),  # two values may be so near each other that rounding is all there is
}
BOTH = pytest.mark.parametrize("memory", ["contiguous", "channels_last"])


@pytest.fixture(autouse=True)
def _nan_in_new_memory():
    """What no kernel writes stays NaN and is found."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=CASES.keys())
def layer(request):
    layer = copy.deepcopy(CASES[request.param]).to(DEVICE)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.uniform_(0.5, 1.5)
    return layer


@pytest.fixture(params=["whole", "cut", "turns"])
def machine(request, monkeypatch):
    """Small tiles and several of them a program; or less room than a pixel has channels."""
    if request.param != "whole":
        monkeypatch.setattr(pixel, "TILE", 16)
        monkeypatch.setattr(pixel, "SIDE_BY_SIDE", 4)
        monkeypatch.setattr(forms, "PROGRAMS", 3)
    if request.param == "turns":
        monkeypatch.setattr(pixel, "MOST", 1)
        monkeypatch.setattr(pixel, "MOST_LAST", 1)
        monkeypatch.setattr(pixel, "TILE", 8)
    caches = pixel._map, pixel._gradient
    for cache in caches:
        cache.cache_clear()
    yield request.param
    for cache in caches:
        cache.cache_clear()


def gradients(layer, x, residual, activation, grad):
    y = layer(x, residual, activation)
    return y, *torch.autograd.grad(y, [x, residual, *layer.parameters()], grad)


def compared(layer, x, activation):
    """Output and every gradient, against the torch backend in float64."""
    exact = copy.deepcopy(layer).double()
    residual, grad = torch.randn_like(x), torch.randn_like(x)
    # no value so near 0 that rounding decides on which side of a ReLU it falls
    residual += 0.1 * (exact(x.double(), residual.double()).abs() < 1e-3)
    with nk.use_backend("triton"):
        found = gradients(layer, x.requires_grad_(), residual.requires_grad_(), activation, grad)
    with nk.use_backend("torch"):
        wide = [t.detach().double().requires_grad_() for t in (x, residual)]
        truth = gradients(exact, *wide, activation, grad.double())
    assert found[0].stride() == found[1].stride() == x.stride()
    for mine, theirs in zip(found, truth, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-4, atol=1e-5)


@BOTH
def test_equal_to_the_generic_path(layer, memory, machine):
    """On each machine both memories, with all activations among them."""
    number = 2 * ("whole", "cut", "turns").index(machine) + (memory == "channels_last")
    activation = ("none", "relu", "silu", "silu", "none", "relu")[number]
    x = inputs(3, (3, 2), memory, torch.float32, layer.channels).to(DEVICE)
    form = pixel._form(layer.channels, 6, memory == "channels_last")
    turns = pixel.pixel_turns_map_kernel in form.kernels
    assert turns == (machine == "turns")
    assert turns == (form.channels < layer.channels) or layer.channels == 2
    compared(layer, x, activation)


@pytest.mark.parametrize("shape", [(7,), (1, 1), (2, 1, 3), ()], ids=str)
def test_any_shape(shape, machine):
    layer = nk.PN(11).to(DEVICE)
    for memory in ("contiguous", "channels_last"):
        x = inputs(4, shape, memory, torch.float32, layer.channels).to(DEVICE)
        compared(layer, x, "silu")


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_types(dtype, memory):
    """At most twice the error of the torch backend, and one rounding that the interpreter cuts."""
    x = inputs(3, (4, 4), memory, dtype).to(DEVICE)
    layer, residual, grad = nk.PN(8).to(DEVICE), torch.randn_like(x), torch.randn_like(x)
    wide = [t.double().requires_grad_() for t in (x, residual)]
    truth = gradients(copy.deepcopy(layer).double(), *wide, "silu", grad.double())
    results = {}
    for backend in ("triton", "torch"):
        with nk.use_backend(backend):
            own = [t.clone().requires_grad_() for t in (x, residual)]
            results[backend] = gradients(layer, *own, "silu", grad)
    for mine, theirs, exact in zip(*results.values(), truth, strict=True):
        assert mine.dtype == theirs.dtype
        allowed = 2 * (theirs - exact).norm() + torch.finfo(dtype).eps * exact.norm()
        assert (mine - exact).norm() <= allowed


def test_variances_do_not_cancel(machine):
    """A mean far from zero."""
    x = 4096 + torch.randn(2, 40, 3, device=DEVICE)
    with nk.use_backend("triton"):
        y = nk.PN(40).to(DEVICE)(x)
    expected = nk.PN(40).double().to(DEVICE)(x.double())
    torch.testing.assert_close(y.double(), expected, rtol=1e-3, atol=1e-3)


@BOTH
def test_the_backward_of_a_backward(layer, memory):
    """Through the plain expression; equal to what the torch backend differentiates."""
    x = inputs(3, (3, 2), memory, torch.float32, layer.channels).to(DEVICE)
    residual, grad = torch.randn_like(x), torch.randn_like(x)

    def penalty(activation):
        a, r, g = (t.clone().requires_grad_() for t in (x, residual, grad))
        y = layer(a, r, activation)
        first = torch.autograd.grad(y, [a, r, *layer.parameters()], g, create_graph=True)
        total = sum(t.square().sum() for t in first)
        inputs = [a, g, *([] if layer.weight is None else [layer.weight])]
        return *first, *torch.autograd.grad(total, inputs)

    for activation in ("none", "silu"):
        with nk.use_backend("triton"):
            found = penalty(activation)
        with nk.use_backend("torch"):
            expected = penalty(activation)
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)


@pytest.fixture
def started(monkeypatch):
    """The kernels that were launched."""
    found = []
    call = triton_passes.Launch.__call__

    def counted(self, *tensors):
        found.append(self.kernel)
        return call(self, *tensors)

    monkeypatch.setattr(triton_passes.Launch, "__call__", counted)
    return found


@BOTH
def test_one_launch_forward_two_backward(memory, started):
    x = inputs(2, (3, 3), memory, torch.float32).to(DEVICE).requires_grad_()
    with nk.use_backend("triton"):
        y = nk.PN(8).to(DEVICE)(x)
        assert started == [pixel.pixel_map_kernel]
        y.sum().backward()
    assert started[1:] == [
        pixel.pixel_gradient_kernel,
        pixel.parameter_gradient_kernel,
    ]


def test_more_pixels_than_other_kernels_serve(started, monkeypatch):
    """why() asked for pixels as cells of the general passes, whose grids hold 65,535 tiles of
    them; so it named torch, or no backend at all, where the kernels of this file ran."""
    monkeypatch.setattr(triton_passes, "GRID_LIMIT", 1)
    triton_passes._serves.cache_clear()
    layer, x = nk.PN(4).to(DEVICE), inputs(2, (5, 5), dtype=torch.float32, channels=4).to(DEVICE)
    try:
        with nk.use_backend("triton"):
            assert nk.why(layer, x) == "pn runs on triton (forced), fused."
            layer(x)
            assert started == [pixel.pixel_map_kernel]
            wide = torch.randn(2, 4, 5, 5, device=DEVICE).to(memory_format=torch.channels_last)
            said = nk.why(layer, wide)  # two blocks of channels: more than there may be
            with pytest.raises(OptionError, match="more cells than a kernel's grid holds"):
                layer(wide)
        assert said.startswith("pn runs on no backend: Triton is asked for, but more cells")
    finally:
        triton_passes._serves.cache_clear()


def test_an_in_place_activation_may_follow():
    x = inputs(dtype=torch.float32).to(DEVICE).requires_grad_()
    with nk.use_backend("triton"):
        torch.relu_(nk.PN(8).to(DEVICE)(x)).sum().backward()
    assert torch.isfinite(x.grad).all()


def test_transforms_get_the_expression():
    x = inputs(2, (3, 2), dtype=torch.float32).to(DEVICE)
    layer = nk.PN(8).to(DEVICE)
    with nk.use_backend("triton"):
        found = torch.func.grad(lambda t: layer(t).square().sum())(x)
    expected = torch.func.grad(lambda t: layer(t).square().sum())(x)
    torch.testing.assert_close(found, expected)


def test_a_compiled_layer_takes_the_generic_path():
    x = inputs(dtype=torch.float32).to(DEVICE)
    layer = nk.PN(8).to(DEVICE)
    with nk.use_backend("triton"):
        y = torch.compile(layer, backend="eager", fullgraph=True)(x)
    torch.testing.assert_close(y, layer(x), rtol=1e-4, atol=1e-5)
