"""Layers that Triton computes without tables in between: the same as the generic path."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import normkit as nk
from cases import inputs
from normkit.core.fusion import Pool
from normkit.core.layout import Channels
from normkit.engine import plain
from normkit.errors import NonFiniteWarning

pytest.importorskip("triton", reason="Triton is not installed")
from normkit.engine.families import fused, held
from normkit.engine.triton import forms as triton_forms
from normkit.engine.triton import passes as triton_passes

PASSES = ("moments", "affine", "sums", "gradient")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = {
    "bn": nk.BN(8),
    "bn-plain": nk.BN(8, affine=False),
    "bn-cumulative": nk.BN(8, momentum=None),
    "bn-untracked": nk.BN(8, track_running_stats=False),
    "bn-biased": nk.BN(8, running_var_correction=0),
    "ghost_bn": nk.GhostBN(8, virtual_batch=64),
    "input_norm": nk.InputNorm(8),
    "gn": nk.GN(8, groups=4),
    "gn-plain": nk.GN(8, groups=2, affine=False),
    "ln": nk.LN(8),
    "in": nk.IN(8),
    "bn-wide": nk.BN(20),
    "rbn-wide": nk.RBN(20),
    "bcn-wide": nk.BCN(24, groups=4),
    "bgn": nk.BGN(8, groups=2),
    "bgn-odd": nk.BGN(9, groups=3),
    "batch_renorm": nk.BatchRenorm(8, r_ramp=None, d_ramp=None),
    "batch_renorm-ramp": nk.BatchRenorm(8, r_ramp=(0, 4), d_ramp=(1, 9)),
    "rbn": nk.RBN(8),
    "rbn-uncentred": nk.RBN(8, centering=False),
    "rbn-minus": nk.RBN(8, minus=True),
    "rbn-plain": nk.RBN(8, affine=False),
    "rbn-eval": nk.RBN(8).eval(),
    "iebn": nk.IEBN(8),
    "iebn-minus": nk.IEBN(8, minus=True),
    "iebn-untracked": nk.IEBN(8, track_running_stats=False),
    "bcn": nk.BCN(8, groups=2),
    "bcn-odd": nk.BCN(9, groups=3),
    "bcn-channel": nk.BCN(8, groups=4, affine_per="channel"),
    "bcn-plain": nk.BCN(8, groups=4, affine=False),
    "bcn-eval": nk.BCN(8, groups=2).eval(),
    "bcn-micro": nk.BCN(8, groups=2, micro=True, update_rate=0.3),
    "bcn-micro-eval": nk.BCN(8, groups=2, micro=True, update_rate=0.3).eval(),
}


@pytest.fixture
def layer(request):
    layer = copy.deepcopy(request.param).to(DEVICE)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.uniform_(0.5, 1.5)
    return layer


@pytest.fixture
def machine(request, monkeypatch):
    """A large one cuts long cells into parts."""
    whole = triton_passes.form_of
    if request.param == "large":
        monkeypatch.setattr(held, "holding", lambda *_: None)  # three launches each way
        monkeypatch.setattr(triton_forms, "UNROLL", 2)
        monkeypatch.setattr(triton_passes, "_multiprocessors", lambda device: 64)
        monkeypatch.setattr(
            triton_passes,
            "form_of",
            lambda shape: whole(shape)._replace(tile_positions=4, tile_cells=8),
        )
    caches = [getattr(triton_passes, f"_{name}") for name in PASSES]
    for cache in caches:
        cache.cache_clear()
    yield request.param
    for cache in caches:
        cache.cache_clear()


def pytest_generate_tests(metafunc):
    if "layer" in metafunc.fixturenames:
        metafunc.parametrize("layer", CASES.values(), ids=CASES.keys(), indirect=True)


def gradients(layer, x, residual, activation, grad):
    wanted = [x, residual, *(p for p in layer.parameters() if p.requires_grad)]
    y = layer(x, residual, activation)
    return y, *torch.autograd.grad(y, wanted, grad)


@pytest.mark.parametrize(
    ("activation", "memory", "machine"),
    [
        ("none", "contiguous", "small"),
        ("silu", "channels_last", "small"),
        ("relu", "contiguous", "large"),
        ("relu", "channels_last", "large"),
    ],
    indirect=["machine"],
)
def test_equal_to_the_generic_path(layer, activation, memory, machine):
    """Output, every gradient, every buffer; against the torch backend in float64."""
    exact = copy.deepcopy(layer).double()
    x = inputs(5, (5, 3), memory, torch.float32, layer.channels).to(DEVICE)
    form = triton_passes.form_of(tuple(layer.cells(x).view(x).shape))
    splits = triton_forms.reduction_of(form, triton_passes._multiprocessors(x.device)).splits
    assert splits > 1 or machine == "small"
    residual, grad = torch.randn_like(x), torch.randn_like(x)
    # no value so near 0 that rounding decides on which side of a ReLU it falls
    near = copy.deepcopy(exact)(x.double(), residual.double()).abs() < 1e-3
    residual = residual + 0.1 * near
    with nk.use_backend("triton"):
        found = gradients(layer, x.requires_grad_(), residual.requires_grad_(), activation, grad)
    with nk.use_backend("torch"):
        wide = [t.detach().double().requires_grad_() for t in (x, residual)]
        truth = gradients(exact, *wide, activation, grad.double())
    assert found[0].stride() == x.stride()
    for mine, theirs in zip(found, truth, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-4, atol=1e-5)
    for mine, theirs in zip(layer.buffers(), exact.buffers(), strict=True):
        torch.testing.assert_close(
            mine.double(), theirs.double(), rtol=1e-5, atol=1e-6, equal_nan=True
        )  # a rate that was never set is NaN


def test_it_is_the_fused_path(layer, monkeypatch):
    """These layers really take it: the generic passes are not called."""

    def refuse(*args):
        raise AssertionError("generic path")

    monkeypatch.setattr(triton_passes, "moments", refuse)
    with nk.use_backend("triton"):
        layer(inputs(dtype=torch.float32, channels=layer.channels).to(DEVICE))


def test_vectors(layer):
    """(N, C), where in has no statistics and gn needs more than one value a group."""
    x = inputs(7, (), dtype=torch.float32, channels=layer.channels).to(DEVICE)
    twin = copy.deepcopy(layer)
    if isinstance(layer, nk.IN):
        with nk.use_backend("triton"), pytest.raises(ValueError, match="more than one position"):
            layer(x)
        return
    with nk.use_backend("triton"):
        y = layer(x)
    with nk.use_backend("torch"):
        torch.testing.assert_close(y, twin(x), rtol=1e-4, atol=1e-5)


def test_the_backward_of_a_backward(layer):
    """Through the plain expression; equal to what the torch backend differentiates."""
    x = inputs(5, (3, 2), dtype=torch.float32, channels=layer.channels).to(DEVICE)
    residual, grad = torch.randn_like(x), torch.randn_like(x)
    twin = copy.deepcopy(layer)

    def penalty(layer):
        a, r, g = (t.clone().requires_grad_() for t in (x, residual, grad))
        y = layer(a, r, "silu")
        (first,) = torch.autograd.grad(y, a, g, create_graph=True)
        parameters = [p for p in layer.parameters() if p.requires_grad and p is not layer.bias]
        return torch.autograd.grad(first.square().sum(), [a, r, g, *parameters])

    with nk.use_backend("triton"):
        found = penalty(layer)
    with nk.use_backend("torch"):
        expected = penalty(twin)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)


def test_the_backward_of_a_backward_of_other_parameters(layer):
    """functional_call has given the layer back its own parameters when the backward comes."""
    x = inputs(5, (3, 2), dtype=torch.float32, channels=layer.channels).to(DEVICE)
    own = {name: p for name, p in layer.named_parameters() if p.requires_grad}
    twin = copy.deepcopy(layer)

    def penalty(layer):
        a = x.clone().requires_grad_()
        given = {name: (p.detach() * 1.1 + 0.1).requires_grad_() for name, p in own.items()}
        y = torch.func.functional_call(layer, given, (a,))
        layer.eval()  # nor is the mode that of the forward any more
        (first,) = torch.autograd.grad(y, a, torch.sin(x), create_graph=True)
        wanted = [a, *(p for name, p in given.items() if name != "bias")]
        return torch.autograd.grad(first.square().sum(), wanted, allow_unused=True)

    with nk.use_backend("triton"):
        found = penalty(layer)
    with nk.use_backend("torch"):
        expected = penalty(twin)
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)


def test_many_gradients_at_once(layer):
    x = inputs(2, (2, 2), dtype=torch.float32, channels=layer.channels).to(DEVICE)

    def call(x):
        return copy.deepcopy(layer)(x, torch.ones_like(x), "silu")

    with nk.use_backend("triton"):
        found = torch.autograd.functional.jacobian(call, x, vectorize=True)
    with nk.use_backend("torch"):
        expected = torch.autograd.functional.jacobian(call, x, vectorize=True)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


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
    if layer.training and getattr(layer, "running_mean", None) is not None:
        assert layer.nonfinite_batches == 1


def test_an_in_place_activation_may_follow(layer):
    x = inputs(dtype=torch.float32, channels=layer.channels).to(DEVICE).requires_grad_()
    with nk.use_backend("triton"):
        torch.relu_(layer(x)).sum().backward()
    assert torch.isfinite(x.grad).all()


def test_the_statistics_come_back():
    """They are those of the specification."""
    x = inputs(dtype=torch.float32).to(DEVICE)
    layout = Channels(x)
    pool = Pool("sample", 1e-5, 8, None, None)
    _, tables, begin, _ = fused.fused(x, pool, None, "none", layout)
    found = tables[begin:].view(2, -1)
    expected = torch.stack(plain.moments(x, layout)).flatten(1)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["rbn", "ubn"])
def test_the_gradient_of_centering_does_not_cancel(name):
    """Means far from zero: Σ m·g, of which Σ g is nothing, lost two digits more than torch."""
    errors = {"torch": 0.0, "triton": 0.0}
    for _ in range(4):
        layer = nk.make(name, 8).to(DEVICE)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
        x = 30 + torch.randn(8, 8, 5, 5, device=DEVICE)
        grad = torch.randn_like(x)

        def slope(layer, backend, x=x, grad=grad):
            with nk.use_backend(backend):
                y = layer(x.to(layer.weight.dtype))
            return torch.autograd.grad(y, layer.center_weight, grad.to(y.dtype))[0].double()

        truth = slope(copy.deepcopy(layer).double(), "torch")
        for backend, worst in errors.items():
            error = (slope(copy.deepcopy(layer), backend) - truth).norm() / truth.norm()
            errors[backend] = max(worst, error.item())
    assert errors["triton"] < 2 * errors["torch"]


@pytest.mark.parametrize("name", ["bn", "ubn"])
def test_kernels_write_into_the_rows_of_a_domain(name):
    """Rows of nine numbers are not aligned; those of the domain in use change, and no others."""
    layer = nk.make(name, 9, domains=2).to(DEVICE)
    exact = copy.deepcopy(layer)
    for domain in (1, 0):
        x = domain + torch.randn(4, 9, 3, 3, device=DEVICE)
        with nk.use_domain(layer, domain), nk.use_domain(exact, domain):
            with nk.use_backend("triton"):
                assert layer.path(x).name == "fused"
                found = layer(x)
            with nk.use_backend("torch"):
                torch.testing.assert_close(found, exact(x), rtol=1e-4, atol=1e-5)
    assert layer.num_batches_tracked.tolist() == [1, 1]
    for (key, mine), theirs in zip(layer.named_buffers(), exact.buffers(), strict=True):
        if key != "arrivals":
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
