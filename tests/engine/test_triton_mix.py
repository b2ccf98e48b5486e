"""Switchable normalization with its mixtures in kernels: the same as the generic path."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import normkit as nk
from cases import inputs
from normkit.engine.torch import passes as torch_passes
from normkit.errors import NonFiniteWarning

pytest.importorskip("triton", reason="Triton is not installed")
from normkit.engine.families import mix
from normkit.engine.triton import forms as triton_forms
from normkit.engine.triton import passes as triton_passes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = {
    "sn": nk.SN(11),
    "plain": nk.SN(8, affine=False),
    "unbiased": nk.SN(8, unbiased=True),
    "no-batch": nk.SN(8, use_bn=False),
    "untracked": nk.SN(8, track_running_stats=False),
    "cumulative": nk.SN(8, momentum=None),
    "eval": nk.SN(8).eval(),
    "no-batch-eval": nk.SN(8, use_bn=False, unbiased=True).eval(),
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
    """Away from its start, with shares that differ."""
    layer = copy.deepcopy(CASES[request.param]).to(DEVICE)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.uniform_(0.5, 1.5)
        if layer.running_mean is not None:
            layer.running_mean.uniform_(-0.5, 0.5)
            layer.running_var.uniform_(0.5, 1.5)
    return layer


@pytest.fixture(params=["small", "parts", "many"])
def machine(request, monkeypatch):
    """One part a cell; a few, which the kernels merge; or so many that they are merged before."""
    whole = triton_passes.form_of
    if request.param != "small":
        monkeypatch.setattr(triton_forms, "UNROLL", 2)
        monkeypatch.setattr(triton_passes, "_multiprocessors", lambda device: 64)
        monkeypatch.setattr(
            triton_passes,
            "form_of",
            lambda shape: whole(shape)._replace(tile_positions=4, tile_cells=8),
        )
        monkeypatch.setattr(mix, "WIDTH", 4)
        monkeypatch.setattr(mix, "HIGH", 2)
    if request.param == "many":
        monkeypatch.setattr(mix, "FEW", 1)
    caches = [
        triton_passes._moments,
        triton_passes._sums,
        triton_passes._affine,
        triton_passes._gradient,
        triton_forms.reduction_of,
        mix._map,
        mix._gradient,
    ]
    for cache in caches:
        cache.cache_clear()
    yield request.param
    for cache in caches:
        cache.cache_clear()


def gradients(layer, x, residual, activation, grad):
    y = layer(x, residual, activation)
    return y, *torch.autograd.grad(y, [x, residual, *layer.parameters()], grad)


def compared(layer, x, activation):
    """Output, every gradient, every buffer; against the torch backend in float64."""
    exact = copy.deepcopy(layer).double()
    residual, grad = torch.randn_like(x), torch.randn_like(x)
    # no value so near 0 that rounding decides on which side of a ReLU it falls
    near = copy.deepcopy(exact)(x.double(), residual.double()).abs() < 1e-3
    residual = residual + 0.1 * near
    with nk.use_backend("triton"):
        found = gradients(layer, x.requires_grad_(), residual.requires_grad_(), activation, grad)
    with nk.use_backend("torch"):
        wide = [t.detach().double().requires_grad_() for t in (x, residual)]
        truth = gradients(exact, *wide, activation, grad.double())
    assert found[0].stride() == found[1].stride() == x.stride()
    for mine, theirs in zip(found, truth, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-4, atol=1e-5)
    for mine, theirs in zip(layer.buffers(), exact.buffers(), strict=True):
        torch.testing.assert_close(mine.double(), theirs.double(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("activation", "memory"), [("none", "contiguous"), ("silu", "channels_last")]
)
def test_equal_to_the_generic_path(layer, activation, memory, machine):
    x = inputs(5, (3, 3), memory, torch.float32, layer.channels).to(DEVICE)
    parts = triton_passes.moment_parts(x, layer.cells(x))
    assert (parts.splits > 1) == (machine != "small")
    compared(layer, x, activation)


@pytest.mark.parametrize("shape", [(1, 8, 3, 3), (17, 3, 2), (2, 67, 2, 1, 2), (9, 8)], ids=str)
def test_any_shape(shape):
    for memory in ("contiguous", "channels_last"):
        x = inputs(shape[0], shape[2:], memory, torch.float32, shape[1]).to(DEVICE)
        layer = nk.SN(shape[1]).to(DEVICE)
        with torch.no_grad():
            layer.mean_weight.uniform_(0, 2)
            layer.var_weight.uniform_(0, 2)
        compared(layer, x, "relu")


def test_large_weights_do_not_overflow():
    """The softmax is about the largest weight."""
    layer = nk.SN(8).to(DEVICE)
    with torch.no_grad():
        layer.mean_weight.copy_(torch.tensor([200.0, -200.0, 199.0]))
        layer.var_weight.copy_(torch.tensor([-300.0, 300.0, 300.0]))
    compared(layer, inputs(4, (3, 3), dtype=torch.float32).to(DEVICE), "none")


def test_the_backward_of_a_backward(layer):
    """Through the plain expression; equal to what the torch backend differentiates."""
    x = inputs(5, (3, 2), dtype=torch.float32, channels=layer.channels).to(DEVICE)
    residual, grad = torch.randn_like(x), torch.randn_like(x)
    twin = copy.deepcopy(layer)

    def penalty(layer):
        a, r, g = (t.clone().requires_grad_() for t in (x, residual, grad))
        y = layer(a, r, "silu")
        (first,) = torch.autograd.grad(y, a, g, create_graph=True)
        parameters = [p for p in layer.parameters() if p is not layer.bias]
        return torch.autograd.grad(first.square().sum(), [a, r, g, *parameters])

    with nk.use_backend("triton"):
        found = penalty(layer)
    with nk.use_backend("torch"):
        expected = penalty(twin)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)


@BOTH
def test_four_launches_each_way(memory, monkeypatch):
    started = []
    call = triton_passes.Launch.__call__

    def counted(self, *tensors):
        started.append(self.kernel)
        return call(self, *tensors)

    monkeypatch.setattr(triton_passes.Launch, "__call__", counted)
    x = inputs(2, (3, 3), memory, torch.float32).to(DEVICE).requires_grad_()
    with nk.use_backend("triton"):
        y = nk.SN(8).to(DEVICE)(x)
        assert len(started) == 4
        y.sum().backward()
    assert len(started) == 8


def test_it_is_the_fused_path(layer, monkeypatch):
    """The generic passes are not called."""

    def refuse(*args):
        raise AssertionError("generic path")

    monkeypatch.setattr(triton_passes, "moments", refuse)
    monkeypatch.setattr(torch_passes, "moments", refuse)
    with nk.use_backend("triton"):
        y = layer(inputs(dtype=torch.float32, channels=layer.channels).to(DEVICE))
    assert torch.isfinite(y).all()


def test_layers_that_mix_otherwise_are_left_alone():
    x = inputs(dtype=torch.float32).to(DEVICE)
    for layer in (nk.SSN(8), nk.SN(8, virtual_batch=2)):
        assert layer.fusion(x, layer.state()) is None
    twin = nk.SSN(8).to(DEVICE)
    layer = copy.deepcopy(twin)
    with nk.use_backend("triton"):
        y = layer(x)
    torch.testing.assert_close(y, twin(x), rtol=1e-4, atol=1e-5)


def test_a_compiled_layer_takes_the_generic_path():
    x = inputs(dtype=torch.float32).to(DEVICE)
    layer = nk.SN(8).to(DEVICE)
    twin = copy.deepcopy(layer)
    with nk.use_backend("triton"):
        y = torch.compile(layer, backend="eager", fullgraph=True)(x)
    torch.testing.assert_close(y, twin(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(layer.running_var, twin.running_var)


def test_checkpointing_counts_once(layer):
    twin = copy.deepcopy(layer)
    x = inputs(dtype=torch.float32, channels=layer.channels).to(DEVICE)
    with nk.use_backend("triton"):
        checkpoint(layer, x.clone().requires_grad_(), use_reentrant=False).sum().backward()
        twin(x)
    for mine, theirs in zip(layer.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_batch_never_enters_a_buffer(layer, bad):
    x = inputs(dtype=torch.float32, channels=layer.channels).to(DEVICE)
    with nk.use_backend("triton"), warnings.catch_warnings():
        warnings.simplefilter("ignore", NonFiniteWarning)
        layer(x)
        before = copy.deepcopy(layer.state_dict())
        x[0, 3, 0, 0] = bad  # one channel of one sample: no channel may be updated
        layer(x)
    for key, value in layer.state_dict().items():
        assert torch.equal(value, before[key]), key
    if layer.training and layer.running_mean is not None:
        assert layer.nonfinite_batches == 1
