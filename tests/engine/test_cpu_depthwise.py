"""bnet and ubn on a CPU with their convolution in the same loops of C++: as by torch."""

from __future__ import annotations

import copy
import shutil
from contextlib import nullcontext

import pytest
import torch
from torch.func import functional_call

import normkit as nk
from cases import FORMATS
from normkit.engine import remaking
from normkit.engine.remaking import Remaking
from normkit.errors import NonFiniteWarning

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")
CASES = {
    "bnet": ("bnet", {}),
    "bnet-untracked": ("bnet", {"track_running_stats": False}),
    "bnet-runs": ("bnet", {"virtual_batch": 2}),  # its coefficients from a tape
    "ubn": ("ubn", {}),
    "ubn-condensed": ("ubn", {"tau": -1.0}),  # always this side of the threshold
    "ubn-running": ("ubn", {"tau": 1.0}),  # and always beyond it
    "ubn-always": ("ubn", {"fct": False}),
    "ubn-before": ("ubn", {"gate": "before"}),
    "ubn-uncentred": ("ubn", {"centering": False}),
}
# one position, no neighbours on two sides, rests of lanes, several bands in either format
SIZES = [(1, 1), (1, 6), (6, 1), (2, 2), (4, 4), (3, 7), (17, 3), (11, 50), (70, 33)]
FOLLOWED = [("none", False), ("relu", True), ("relu", False), ("none", True)]
ROUNDED = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9}
every_case = pytest.mark.parametrize("case", CASES)
every_format = pytest.mark.parametrize("memory", FORMATS)


def layer_of(case, channels=8):
    name, options = CASES[case]
    layer = nk.make(name, channels, **options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        if layer.running_mean is not None:
            layer.running_mean.uniform_(-0.5, 0.5)
            layer.running_var.uniform_(0.5, 1.5)
    return layer


def batch(memory="contiguous", size=(5, 7), channels=8, n=3, dtype=torch.float64, mean=3.0):
    x = (mean + 2 * torch.randn(n, channels, *size)).to(dtype)
    return x if memory == "contiguous" else x.movedim(1, -1).contiguous().movedim(-1, 1)


def step(layer, x, grad, residual=None, activation="none"):
    """All that a step gives, by name, and autograd's node."""
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    residual = None if residual is None else residual.detach().clone().requires_grad_()
    layer.zero_grad()
    y = layer(x, residual, activation)
    y.backward(grad)
    made = {"y": y.detach(), "dx": x.grad, **dict(layer.named_buffers())}
    made |= {name: p.grad for name, p in layer.named_parameters()}
    if residual is not None:
        made["dr"] = residual.grad
    return made, y.grad_fn.name()


def exactly(layer, *given):
    """The same step by torch, all of it in double."""
    with nk.use_backend("torch"):
        return step(copy.deepcopy(layer).double(), *given)[0]


def agree(found, expected):
    """As near as the types of the layer's tensors allow."""
    assert found.keys() == expected.keys()
    for name, wanted in expected.items():
        near = 1e-11 if found[name].dtype == torch.float64 else 1e-6
        most = max(float(wanted.abs().max()), 1.0)
        torch.testing.assert_close(
            found[name].double(), wanted.double(), rtol=near, atol=near * most, msg=name
        )


@every_format
@every_case
def test_as_by_torch(case, memory):
    """Activations in double, so that nothing hides in roundings; twice: the second has a plan."""
    for i, size in enumerate(SIZES):
        if case == "bnet-runs" and size == (1, 1):
            continue  # the last run has a single value
        layer = layer_of(case)
        for activation, with_residual in (FOLLOWED[i % 4], FOLLOWED[(i + 1) % 4]):
            x, grad, rest = (batch(memory, size) for _ in range(3))
            given = x, grad, rest if with_residual else None, activation
            expected = exactly(layer, *given)
            found, node = step(layer, *given)
            assert "NormalizerStep" in node
            agree(found, expected)


@every_format
@pytest.mark.parametrize("channels", [1, 3, 17, 70, 130])
@pytest.mark.parametrize("case", ["bnet", "ubn"])
def test_any_number_of_channels(case, channels, memory):
    """Parts of a vector, a vector and parts of one, several blocks."""
    layer = layer_of(case, channels)
    x, grad, rest = (batch(memory, channels=channels) for _ in range(3))
    expected = exactly(layer, x, grad, rest, "relu")
    agree(step(layer, x, grad, rest, "relu")[0], expected)


@every_format
@pytest.mark.parametrize("dtype", ROUNDED, ids=str)
@pytest.mark.parametrize("mean", [0.0, 100.0])
@pytest.mark.parametrize("case", ["bnet", "ubn"])
def test_as_near_to_the_truth_as_torch(case, dtype, mean, memory):
    """Errors at most four times those of torch in the same type, or some roundings of the largest
    value, of sums of what goes into them."""
    layer = layer_of(case, 18)
    for size in ((4, 4), (9, 31), (40, 40)):
        x, grad = (batch(memory, size, 18, dtype=dtype, mean=m) for m in (mean, 0.0))
        truth = exactly(layer, x.double(), grad.double())
        with nk.use_backend("torch"):
            usual, _ = step(copy.deepcopy(layer), x, grad)
        found, node = step(copy.deepcopy(layer), x, grad)
        assert "NormalizerStep" in node
        for name, wanted in truth.items():
            errors = [(t[name].double() - wanted).abs().max() for t in (found, usual)]
            rounding = ROUNDED.get(found[name].dtype, 0.0) * float(wanted.double().abs().max())
            if name not in ("y", "dx"):
                rounding += 2.0**-24 * float(grad.double().abs().sum()) / layer.channels
            assert errors[0] <= 4 * errors[1] + 8 * rounding, (name, size)
            assert found[name].dtype == usual[name].dtype


@every_case
def test_eval_mode_and_forwards_alone(case):
    layer = layer_of(case)
    layer.train(layer.running_mean is None).requires_grad_(True)
    for memory in FORMATS:
        x, grad = batch(memory), batch(memory)
        expected = exactly(layer, x, grad)
        found, node = step(layer, x, grad)
        assert ("NormalizerStep" in node) or layer.training
        agree(found, expected)
        with torch.no_grad():
            alone = layer(x)
        torch.testing.assert_close(alone, found["y"], rtol=1e-12, atol=1e-12)


@every_format
@pytest.mark.parametrize("activation", ["none", "relu"])
@pytest.mark.parametrize("name", ["bnet", "ubn"])
def test_derivatives_and_those_of_derivatives(name, activation, memory):
    """Against differences, of x, residual and every parameter."""
    options = {"track_running_stats": False, **({"fct": False} if name == "ubn" else {})}
    layer = nk.make(name, 2, **options).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    x, rest = (batch(memory, (3, 2), 2, n=2).requires_grad_() for _ in range(2))
    own = dict(layer.named_parameters())

    def function(x, rest, *parameters):
        y = functional_call(layer, dict(zip(own, parameters, strict=True)), (x, rest, activation))
        assert "NormalizerStep" in y.grad_fn.name()
        return y

    given = x, rest, *(p.detach().clone().requires_grad_() for p in own.values())
    assert torch.autograd.gradcheck(function, given)
    assert torch.autograd.gradgradcheck(function, given)


@every_case
def test_a_gradient_that_is_differentiated(case):
    layer, given, rest, found = layer_of(case), batch(), batch(), []
    for backend in ("auto", "torch"):
        own = copy.deepcopy(layer)
        x, r = given.clone().requires_grad_(), rest.clone().requires_grad_()
        with nk.use_backend(backend):
            y = own(x, r, "relu")
            assert backend == "torch" or "NormalizerStep" in y.grad_fn.name()
            loss = ((y + 1) ** 3).sum()  # with a gradient beyond the ReLU too
            first = torch.autograd.grad(loss, [x, r, own.weight], create_graph=True)
            square = sum(d.square().sum() for d in first)
            second = torch.autograd.grad(square, [x, r, *own.parameters()])
            found.append([*(d.detach() for d in first), *second])
    for got, wanted in zip(*found, strict=True):
        near = 1e-10 if got.dtype == torch.float64 else 1e-5
        torch.testing.assert_close(got, wanted, rtol=near, atol=near * float(wanted.abs().max()))


@every_format
def test_threads_change_nothing_but_roundings(memory):
    """Also where channels are too few for them, and samples."""
    before = torch.get_num_threads()
    for case, n, channels in (("bnet", 5, 3), ("ubn", 9, 40), ("bnet", 1, 2)):
        layer, x = layer_of(case, channels), batch(memory, (130, 70), channels, n)
        grad, found = torch.randn_like(x), []
        for threads in (1, 3):
            torch.set_num_threads(threads)
            try:
                found.append(step(copy.deepcopy(layer), x, grad, x, "relu")[0])
            finally:
                torch.set_num_threads(before)
        agree(*found)


@every_format
@pytest.mark.parametrize("make", [lambda g: g.mT.contiguous().mT, lambda g: g[:1].expand_as(g)])
def test_gradients_laid_in_another_way(make, memory):
    layer = layer_of("ubn")
    x, grad = batch(memory, (4, 6)), make(batch(size=(4, 6)))
    expected = exactly(layer, x, grad.contiguous())
    agree(step(layer, x, grad)[0], expected)


@pytest.mark.parametrize("frozen", [("weight",), ("bias",), ("weight", "bias"), ("gate_bias",)])
@pytest.mark.parametrize("training", [True, False])
def test_what_is_frozen_has_no_gradient(frozen, training):
    layer = layer_of("ubn").train(training)
    for name in frozen:
        getattr(layer, name).requires_grad_(False)
    x, grad = batch(), batch()
    expected = exactly(layer, x, grad)
    found, node = step(layer, x, grad)
    assert "NormalizerStep" in node
    learned = {name for name, d in found.items() if d is not None}
    assert {name for name in expected if expected[name] is None} == {*frozen}
    agree({name: found[name] for name in learned}, {name: expected[name] for name in learned})
    still = batch()  # an input without a gradient
    y = layer(still)
    y.backward(grad)
    assert still.grad is None


@pytest.mark.filterwarnings("ignore:.*left it out")
@every_format
@pytest.mark.parametrize("case", ["bnet", "ubn"])
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_what_is_not_finite_goes_no_further_than_by_torch(bad, case, memory):
    """The channel in training; its neighbours where statistics are given."""
    for training in (True, False):
        layer, x = layer_of(case).train(training), batch(memory)
        x[1, 2, 0, 6] = bad  # beside the border, behind which the next row begins
        expected = exactly(layer, x, torch.ones_like(x), None, "relu")
        found, _ = step(layer, x, torch.ones_like(x), None, "relu")
        for name in ("y", "dx", "running_mean", "nonfinite_batches"):
            assert torch.equal(found[name].isnan(), expected[name].isnan()), name


def test_a_batch_that_is_left_out_is_told():
    layer, x = layer_of("bnet"), batch(dtype=torch.float32)
    layer(x.requires_grad_())
    kept = layer.running_mean.clone()
    with pytest.warns(NonFiniteWarning, match="left it out"):
        layer(x * torch.nan)
    assert torch.equal(layer.running_mean, kept)


@pytest.mark.parametrize("activation", ["relu6", "gelu"])
def test_activations_that_loops_do_not_know(activation, monkeypatch):
    """They come after what loops have convolved."""
    layer, (x, grad, rest) = layer_of("ubn"), (batch() for _ in range(3))
    expected = exactly(layer, x, grad, rest, activation)
    monkeypatch.setattr("normkit.layers.ubn.depthwise", None)
    agree(step(layer, x, grad, rest, activation)[0], expected)


def test_it_is_told_what_convolves(monkeypatch):
    """And what is told runs."""
    calls = []
    for module in ("bnet", "ubn"):
        path = f"normkit.layers.{module}.depthwise"
        plain = nk.engine.torch.operations.depthwise
        monkeypatch.setattr(path, lambda *a, plain=plain: (calls.append(1), plain(*a))[1])

    def whole(layer, x):
        said = nk.why(layer, x)
        calls.clear()
        layer(x)
        assert said.startswith(f"{layer.card.name} runs in C++")
        assert ("its convolution by torch" in said) == bool(calls)
        return not calls

    maps = torch.randn(4, 8, 5, 5)
    for name in ("bnet", "ubn"):
        assert whole(nk.make(name, 8), maps)
        assert whole(nk.make(name, 8).eval(), maps)
        assert not whole(nk.make(name, 8, kernel_size=5), maps)
        assert not whole(nk.make(name, 8), torch.randn(4, 8))
        assert not whole(nk.make(name, 8, dims=1), torch.randn(4, 8, 5))
        gaps = nk.make(name, 8)
        gaps.weight = torch.nn.Parameter(torch.randn(8, 1, 3, 6)[..., ::2])
        assert not whole(gaps, maps)
        layer = nk.make(name, 8)
        assert whole(layer, maps)
        heard = []
        layer.listeners = (heard.append,)
        for _ in range(2):
            assert whole(layer, maps)
        assert len(heard) == 2
        layer.listeners = ()
        assert whole(layer, maps)
        with Remaking():
            assert whole(layer, maps)
        assert whole(layer, maps)


@pytest.mark.parametrize("case", ["bnet", "ubn"])
def test_outputs_that_are_made_again(case, monkeypatch):
    """To the last bit, for whoever waits for them."""
    made, first = [], remaking._Node.made
    monkeypatch.setattr(remaking._Node, "made", lambda node: made.append(node) or first(node))
    for activation, with_residual in FOLLOWED:
        layer, (x, rest, factor) = layer_of(case), (batch() for _ in range(3))
        rest, found = rest if with_residual else None, []
        for block in (nullcontext(), Remaking()):
            own, given = copy.deepcopy(layer), x.clone().requires_grad_()
            with block:
                y = own(given, rest, activation)
                assert "NormalizerStep" in y.grad_fn.name()
                loss = (y * factor).sum() + (y * y).sum()  # whose backward needs y
            loss.backward()
            found.append([given.grad, *(p.grad for p in own.parameters())])
        for one, other in zip(*found, strict=True):
            assert torch.equal(one, other)
    assert len({id(node) for node in made}) == len(FOLLOWED)


def test_kernels_of_other_sizes_are_not_read_by_loops():
    layer, x = layer_of("bnet"), batch(dtype=torch.float32)
    layer(x)
    for shape in ((8, 1, 1, 3), (4, 1, 3, 3)):
        other = copy.deepcopy(layer)
        other.weight.data = torch.ones(shape)
        if shape[0] == 8:
            other(x)  # another convolution, which torch knows
        else:
            with pytest.raises(RuntimeError):
                other(x)
    layer.bias.data = torch.ones(4)
    with pytest.raises(RuntimeError):
        layer(x)


@every_format
@pytest.mark.parametrize("case", ["bnet", "ubn-uncentred"])
def test_of_a_mean_far_from_zero_nothing_is_left(case, memory):
    """A center that does not fit into a float: what is missing of it counts as often as there are
    values, in the gradient of the kernel and in the sums of the norm."""
    layer, x = layer_of(case), batch(memory, (40, 30), dtype=torch.float32, mean=1000.0)
    grad = 1 + (x - 1000) / 2
    truth, (found, _) = exactly(layer, x.double(), grad.double()), step(layer, x, grad)
    values = x.numel() // layer.channels
    for name, wanted in truth.items():
        if name in ("weight", "bias", "dx"):  # the first two are sums of values of about 1
            near = 2.0**-20 * (1 if name == "dx" else values)
            torch.testing.assert_close(
                found[name].double(), wanted.double(), rtol=2.0**-20, atol=near
            )


def test_every_bfloat16_is_rounded_as_by_torch():
    """To nearest, ties to even. The products fit into a float, so there is one rounding to it."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    x = bits.view(torch.bfloat16)
    x = torch.where(x.isfinite(), x, 1).reshape(1, 1, 256, 256)
    layer = nk.make("bnet", 1, eps=0.0, init="dirac").eval()
    for scale, shift in ((1.0, 0.0), (1.0 + 2.0**-8, 0.0), (0.75, 0.1)):
        with torch.no_grad():
            layer.weight[0, 0, 1, 1], layer.bias[0] = scale, shift
        wanted = (x.float() * scale + shift).to(torch.bfloat16)
        torch.testing.assert_close(layer(x), wanted, rtol=0, atol=0)


def test_plans_of_a_norm_alone_are_no_plans_of_all():
    """A kernel in half precision is torch's; then it is another one, and nobody said so."""
    layer, x = layer_of("bnet"), batch(dtype=torch.float32)
    layer.listeners = (lambda moments: None,)
    kernel = layer.weight.data
    layer.weight.data = kernel.half()
    layer(x)
    layer.weight.data = kernel
    with nk.use_backend("torch"):
        expected = copy.deepcopy(layer)(x)
    torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)
