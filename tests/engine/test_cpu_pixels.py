"""Positional normalization by loops in C++: as by torch, for any number of channels and pixels."""

from __future__ import annotations

import copy
import shutil

import pytest
import torch
from torch import nn

import normkit as nk
from normkit.core.layout import Pixels
from normkit.engine import remaking
from normkit.engine.cpu import passes as cpp_passes

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")
EPS = {torch.float32: 2.0**-24, torch.float64: 2.0**-53, torch.bfloat16: 2.0**-9}
BOTH = pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
# rests of vectors, several vectors side by side, more channels than are added up in one go
SHAPES = [
    (2, 2),
    (1, 3, 1),
    (3, 7, 1, 1),
    (2, 17, 5, 7),
    (2, 16, 4, 4),
    (1, 40, 67),
    (3, 64, 8, 8),
    (2, 300, 3, 7),
    (1, 2100, 2, 3),
    (2, 5, 2, 3, 2),
]


@pytest.fixture(autouse=True)
def _nan_in_new_memory():
    """What no loop writes stays NaN and is found."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def tensor(shape, last=False, dtype=torch.float32, mean=0.0):
    made = (mean + 2 * torch.randn(shape)).to(dtype)
    return made.movedim(1, -1).contiguous().movedim(-1, 1) if last else made


def make(channels=16, **options):
    layer = nk.PN(channels, **options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return layer


def step(layer, x, grad, residual=None, activation="none"):
    """All that a step gives, and the name of autograd's node."""
    x, residual = (
        None if t is None else t.clone(memory_format=torch.preserve_format).requires_grad_()
        for t in (x, residual)
    )
    layer.zero_grad()
    y = layer(x, residual, activation)
    y.backward(grad)
    made = {"y": y.detach(), "dx": x.grad, "dr": None if residual is None else residual.grad}
    return made | {k: p.grad for k, p in layer.named_parameters()}, y.grad_fn.name()


def compared(layer, x, grad, residual=None, activation="none"):
    """Errors against torch in float64: at most four times those of torch's operations in the same
    type, or some roundings of the largest value."""
    exact, rounding = copy.deepcopy(layer).double(), EPS[x.dtype]
    wide = None if residual is None else residual.double()
    with nk.use_backend("torch"):
        if activation == "relu":  # where it bends, a rounding decides on the gradient
            pre = exact(x.double(), wide).detach()
            grad = torch.where(pre.abs() > 64 * rounding * pre.abs().max(), grad, 0)
        truth, _ = step(exact, x.double(), grad.double(), wide, activation)
        by_torch, _ = step(copy.deepcopy(layer), x, grad, residual, activation)
    found, node = step(layer, x, grad, residual, activation)
    assert "NormalizerStep" in node
    assert found["y"].stride() == found["dx"].stride() == x.stride()
    for name, wanted in truth.items():
        if wanted is None:
            assert found[name] is None
            continue
        assert found[name].dtype == by_torch[name].dtype
        error, usual = ((t[name].double() - wanted).abs().max() for t in (found, by_torch))
        assert error <= 4 * usual + 64 * rounding * max(1.0, float(wanted.abs().max())), name


@BOTH
@pytest.mark.parametrize("dtype", EPS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_shape_and_type(shape, dtype, last):
    layer = make(shape[1], eps=0.1)  # two values may be nearer to each other than their roundings
    for activation, follows in (("none", False), ("relu", True), ("relu", False), ("none", True)):
        x, grad, residual = (tensor(shape, last, dtype, mean) for mean in (3, 0, 0))
        compared(layer, x, grad, residual if follows else None, activation)


@BOTH
@pytest.mark.parametrize(
    "options", [{"unbiased": True}, {"affine": False}, {"eps": 0.5}, {"eps": 0.0}], ids=str
)
def test_options(options, last):
    """Without eps what stands beside the last pixels, or channels, must not be divided by."""
    shape = 2, 19, 3, 7
    residual = tensor(shape, last)
    compared(make(19, **options), tensor(shape, last), tensor(shape, last), residual, "relu")


@BOTH
@pytest.mark.parametrize("kept", ["weight", "bias"])
def test_one_parameter_alone(kept, last):
    layer, x = make(), tensor((2, 16, 3, 3), last)
    setattr(layer, "bias" if kept == "weight" else "weight", None)
    compared(layer, x, torch.randn_like(x), torch.randn_like(x), "relu")
    x.requires_grad_()
    (dx,) = torch.autograd.grad(layer(x).pow(3).sum(), x, create_graph=True)
    found = torch.autograd.grad(dx.square().sum(), [x, *layer.parameters()])
    with nk.use_backend("torch"):
        (dx,) = torch.autograd.grad(layer(x).pow(3).sum(), x, create_graph=True)
        wanted = torch.autograd.grad(dx.square().sum(), [x, *layer.parameters()])
    for mine, theirs in zip(found, wanted, strict=True):
        largest = float(theirs.abs().max())
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5 * largest)


@pytest.mark.parametrize("parameters", EPS, ids=str)
def test_parameters_of_other_types(parameters):
    layer, x = make().to(parameters), tensor((2, 16, 5))
    found, node = step(layer, x, x)
    truth, _ = step(copy.deepcopy(layer).double(), x.double(), x.double())
    assert "NormalizerStep" in node
    assert found["weight"].dtype == found["bias"].dtype == parameters
    for name in ("y", "dx", "weight", "bias"):
        rough = 16 * max(EPS[found[name].dtype], EPS[torch.float32])
        largest = float(truth[name].abs().max())
        torch.testing.assert_close(found[name].double(), truth[name], rtol=0, atol=rough * largest)


@BOTH
def test_gradients_are_those_of_the_output(last):
    """By differences, and once more; after the first call by a plan that is there."""
    layer = make(5).double()
    x, residual = (tensor((2, 5, 3), last, torch.float64).requires_grad_() for _ in range(2))

    def y(x, residual, weight, bias):
        given = {"weight": weight, "bias": bias}
        return torch.func.functional_call(layer, given, (x, residual, "relu"))

    given = x, residual, layer.weight, layer.bias
    assert "NormalizerStep" in y(*given).grad_fn.name()
    assert torch.autograd.gradcheck(y, given)
    assert torch.autograd.gradgradcheck(y, given)


@BOTH
def test_means_far_from_zero(last):
    """The mean does not fit into a float, and the squares of such values do not at all."""
    x = 4096 + torch.randn(2, 40, 3, 3, dtype=torch.float64)
    x = x.float().movedim(1, -1).contiguous().movedim(-1, 1) if last else x.float()
    layer = nk.PN(40)
    with torch.no_grad():
        wanted = copy.deepcopy(layer).double()(x.double())
        torch.testing.assert_close(layer(x).double(), wanted, rtol=1e-5, atol=1e-5)


@BOTH
@pytest.mark.parametrize("channels", [37, 49, 300, 999])
def test_equal_channels_have_no_variance(channels, last):
    """None at all: without eps nothing is left to divide by, and with one nothing to divide."""
    value = 1e3 * torch.rand(2, 1, 3, 7)
    x = value + torch.zeros_like(tensor((2, channels, 3, 7), last))
    for eps, wanted in ((0.0, torch.nan), (1e-30, 0.0)):
        y = nk.PN(channels, eps=eps)(x)
        torch.testing.assert_close(y, torch.full_like(y, wanted), rtol=0, atol=0, equal_nan=True)


@BOTH
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_stays_in_its_pixel(bad, last):
    layer, x = make(19), tensor((2, 19, 3, 7), last)
    clean, _ = step(copy.deepcopy(layer), x, torch.ones_like(x))
    x[1, 2, 1, 5] = bad
    found, node = step(copy.deepcopy(layer), x, torch.ones_like(x))
    with nk.use_backend("torch"):
        wanted, _ = step(layer, x, torch.ones_like(x))
    assert "NormalizerStep" in node
    for name in ("y", "dx"):
        assert torch.equal(found[name].isnan(), wanted[name].isnan())
        there = ~wanted[name].isnan()
        assert there.sum() == x.numel() - 19
        assert torch.equal(found[name][there], clean[name][there])
    assert found["weight"].isnan().all()
    torch.testing.assert_close(found["bias"], wanted["bias"])


@BOTH
def test_threads_change_nothing_but_the_sums_of_channels(last):
    layer, x, before = make(), tensor((5, 16, 48, 49), last), torch.get_num_threads()
    made = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        try:
            made.append(step(layer, x, x.cos())[0])
        finally:
            torch.set_num_threads(before)
    for name, one in made[0].items():
        if name in ("y", "dx"):
            assert torch.equal(made[1][name], one)
        elif one is not None:
            most = float(one.abs().max())
            torch.testing.assert_close(made[1][name], one, rtol=1e-5, atol=1e-6 * most)


def test_a_batch_without_samples():
    layer = make()
    x = torch.empty(0, 16, 3, 3, requires_grad=True)
    y = layer(x, None, "relu")
    y.sum().backward()
    assert y.shape == x.grad.shape == x.shape
    assert torch.equal(layer.weight.grad, torch.zeros(16))


def test_gradients_with_gaps_and_of_another_format():
    layer, x = make(), tensor((2, 16, 4, 6))
    grad = torch.randn(2, 16, 4, 12)[..., ::2]
    for given in (grad, grad.to(memory_format=torch.channels_last), torch.ones(1).expand_as(x)):
        found, _ = step(layer, x, given)
        wanted, _ = step(layer, x, given.contiguous())
        for name, one in wanted.items():
            assert one is None or torch.equal(found[name], one)


def test_parameters_with_gaps_and_of_two_names_are_not_for_loops():
    x = tensor((2, 16, 3, 3))
    layer = make()
    layer.weight = nn.Parameter(torch.randn(32)[::2])
    assert nk.why(layer, x) == (
        "pn runs in C++, coefficients by torch, because its parameters or statistics have gaps in "
        "memory."
    )
    twice = make()
    twice.bias = twice.weight
    for own in (layer, twice):
        found, node = step(own, x, torch.ones_like(x))
        with nk.use_backend("torch"):
            wanted, _ = step(own, x, torch.ones_like(x))
        assert "NormalizerStep" not in node
        for name, one in wanted.items():
            if one is not None:
                torch.testing.assert_close(found[name], one, rtol=1e-4, atol=1e-4)


def test_what_is_said_and_who_asks_for_no_gradient():
    layer, x = make(), tensor((2, 16, 3, 3))
    assert nk.why(layer, x) == "pn runs in C++."
    y = layer(x)
    (dweight,) = torch.autograd.grad(y.sum(), layer.weight)
    with nk.use_backend("torch"):
        (wanted,) = torch.autograd.grad(layer(x).sum(), layer.weight)
    torch.testing.assert_close(dweight, wanted, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        assert torch.equal(layer(x), y)
    residual = tensor(x.shape).requires_grad_()
    layer.requires_grad_(False)
    for activation in ("none", "relu"):
        y = layer(x, residual, activation)
        assert "NormalizerStep" in y.grad_fn.name()
        (dr,) = torch.autograd.grad(y.square().sum(), residual, create_graph=True)
        torch.testing.assert_close(dr, 2 * y)


def test_an_option_that_is_set_counts():
    layer, x = make(), tensor((2, 16, 3, 3))
    layer(x)
    layer.eps = 0.5
    with nk.use_backend("torch"):
        wanted = layer(x)
    torch.testing.assert_close(layer(x), wanted, rtol=1e-5, atol=1e-5)


@BOTH
def test_outputs_that_are_made_again(last):
    """In their place the input is kept; the plan for it is written once."""
    layer, after, grads = make(), nn.Conv2d(16, 2, 1), []
    x, residual = tensor((2, 16, 3, 7), last), tensor((2, 16, 3, 7), last)
    for kept in (False, True, True):
        given = x.clone(memory_format=torch.preserve_format).requires_grad_()
        if kept:
            with remaking.Remaking():
                y = layer(given, residual, "relu")
                loss = after(y).square().sum()
        else:
            y = layer(given, residual, "relu")
            loss = after(y).square().sum()
        assert "NormalizerStep" in y.grad_fn.name()
        grads.append(torch.autograd.grad(loss, [given, *layer.parameters(), *after.parameters()]))
    assert len(layer._replays) == 1
    for found in grads[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found, grads[0], strict=True))


@BOTH
def test_moments_of_pixels_by_loops(last):
    """The passes take pixels for channels, and channels for positions."""
    layer, x, found = make(), tensor((2, 16, 3, 7), last).requires_grad_(), []
    for backend in ("auto", "torch"):
        with nk.use_backend(backend):
            _, mean, std = layer.with_moments(x)
            (dx,) = torch.autograd.grad((mean * std).sum(), x)
            found.append((mean, std, dx))
    assert cpp_passes.serves(x, Pixels.of(x)) == ""
    torch.testing.assert_close(*found)
    torch.testing.assert_close(found[0][0], x.mean(1, keepdim=True))
