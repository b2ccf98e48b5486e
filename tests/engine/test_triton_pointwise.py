"""Maps that look at each value alone, by one kernel: the same as the generic path."""

from __future__ import annotations

import copy
import shutil

import numpy as np
import pytest
import torch
from torch.func import functional_call

import normkit as nk
from cases import inputs
from normkit.engine import remaking
from normkit.errors import DeviceError

pytest.importorskip("triton", reason="Triton is not installed")
from normkit.engine.families import pointwise
from normkit.engine.families import pointwise_kernels as kernels
from normkit.engine.triton import forms
from normkit.engine.triton import kernels as triton_kernels
from normkit.engine.triton import passes as triton_passes
from normkit.layers.replayed import Replayed

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = {
    "bn": nk.BN(24).eval(),
    "bn-plain": nk.BN(24, affine=False, eps=0.1).eval(),
    "bgn": nk.BGN(24, groups=4).eval(),
    "frozen_bn": nk.FrozenBN(24),
    "dyt": nk.DyT(24),
    "dyt-plain": nk.DyT(24, affine=False),
}
COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")


@pytest.fixture(autouse=True)
def _nan_in_new_memory():
    """What no kernel writes stays NaN and is found."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def make(name: str):
    layer = copy.deepcopy(CASES[name]).to(DEVICE)
    with torch.no_grad():
        for table in (*layer.parameters(), *layer.buffers()):
            if table.is_floating_point():
                table.uniform_(0.5, 1.5)
    return layer


@pytest.fixture(params=CASES)
def layer(request):
    return make(request.param)


@pytest.fixture
def machine(request, monkeypatch):
    """A large one cuts long cells into parts."""
    whole = triton_passes.form_of
    if request.param == "large":
        monkeypatch.setattr(pointwise, "UNROLL", 2)
        monkeypatch.setattr(pointwise, "LONG", 2)
        monkeypatch.setattr(triton_passes, "_multiprocessors", lambda device: 64)
        monkeypatch.setattr(
            triton_passes,
            "form_of",
            lambda shape: whole(shape)._replace(tile_positions=4, tile_cells=8),
        )
    own = pointwise._map, pointwise._gradient, pointwise._total
    caches = [*own, triton_passes._gradient, triton_passes._affine]
    for cache in caches:
        cache.cache_clear()
    yield request.param
    for cache in caches:
        cache.cache_clear()


@pytest.fixture
def started(monkeypatch):
    """The kernels that were launched; none from a recorded step, whose launches nobody sees."""
    monkeypatch.setattr(Replayed, "_replayed", lambda *given: None)
    found = []
    call = triton_passes.Launch.__call__

    def counted(self, *tensors):
        found.append(self.kernel)
        return call(self, *tensors)

    monkeypatch.setattr(triton_passes.Launch, "__call__", counted)
    return found


def given(seed: int) -> torch.Tensor:
    x = torch.randn(3, 24, 5, 5, generator=torch.Generator().manual_seed(seed))
    return x.to(DEVICE, memory_format=torch.channels_last)


def gradients(layer, x, residual, activation, grad):
    given = [x, *([] if residual is None else [residual]), *layer.parameters()]
    wanted = [t for t in given if t.requires_grad]
    y = layer(x, residual, activation)
    return y, *torch.autograd.grad(y, wanted, grad)


def compared(layer, x, activation, with_residual=True):
    """Output and every gradient, against the torch backend in float64."""
    exact = copy.deepcopy(layer).double()
    residual, grad = torch.randn_like(x), torch.randn_like(x)
    # no value so near 0 that rounding decides on which side of a ReLU it falls
    residual += 0.1 * (exact(x.double(), residual.double()).abs() < 1e-3)
    if not with_residual:
        residual = None
        near = exact(x.double()).abs() < 1e-3
        x = torch.where(near, x + 0.1, x)
    with nk.use_backend("triton"):
        assert "fused" in nk.why(layer, x)
        own = [None if t is None else t.clone().requires_grad_() for t in (x, residual)]
        found = gradients(layer, *own, activation, grad)
        with torch.no_grad():
            assert torch.equal(layer(x, residual, activation), found[0])
    with nk.use_backend("torch"):
        wide = [None if t is None else t.double().requires_grad_() for t in (x, residual)]
        truth = gradients(exact, *wide, activation, grad.double())
    assert found[0].stride() == found[1].stride() == x.stride()
    for mine, theirs in zip(found, truth, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("activation", "memory", "machine", "with_residual"),
    [
        ("none", "contiguous", "small", True),
        ("none", "channels_last", "small", False),
        ("silu", "channels_last", "small", True),
        ("relu", "contiguous", "small", False),
        ("relu", "contiguous", "large", True),
        ("none", "contiguous", "large", False),
        ("relu", "channels_last", "large", True),
    ],
    indirect=["machine"],
)
def test_equal_to_the_generic_path(layer, activation, memory, machine, with_residual):
    x = inputs(5, (5, 4), memory, torch.float32, layer.channels).to(DEVICE)
    if machine == "large":
        form = triton_passes.form_of(tuple(layer.cells(x).extent))
        assert forms.reduction_of(form, 64).splits > 1
    compared(layer, x, activation, with_residual)


@pytest.mark.parametrize("activation", ["none", "silu"])
def test_short_rows(layer, activation, started):
    """Which no vector divides: read as runs."""
    x = inputs(4, (7, 7), "contiguous", torch.float32, layer.channels).to(DEVICE)
    assert triton_passes.form_of(layer.cells(x).extent).flat
    compared(layer, x, activation)
    assert kernels.flat_pointwise_kernel in started
    assert kernels.pointwise_kernel not in started


@pytest.mark.parametrize("shape", [(1,), (5,), (2, 3), (1, 1, 1), (3, 1, 2)], ids=str)
def test_any_shape(layer, shape):
    n, *size = shape
    for memory in ("contiguous", "channels_last"):
        compared(layer, inputs(n, size, memory, torch.float32, 24).to(DEVICE), "silu")


@pytest.mark.parametrize("memory", ["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_types(layer, dtype, memory):
    """At most twice the error of the torch backend, and one rounding that the interpreter cuts."""
    x = inputs(3, (4, 4), memory, dtype, 24).to(DEVICE)
    residual, grad = torch.randn_like(x), torch.randn_like(x)
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


def test_tanh_has_all_its_digits():
    """Of numbers of any size: an exponential alone has none left near zero."""
    sizes = torch.logspace(-30, 2, 3001, dtype=torch.float64).float()
    z = torch.cat([sizes, torch.linspace(0.4, 0.8, 2001), -sizes])
    layer = nk.DyT(1, affine=False, alpha_init=1.0).to(DEVICE)
    x = z.to(DEVICE)[:, None].requires_grad_()
    with nk.use_backend("triton"):
        y = layer(x)
        (dx,) = torch.autograd.grad(y.sum(), x)
    z = z.double().numpy()
    for found, exact, ulps in ((y, np.tanh(z), 4), (dx, np.cosh(np.clip(z, -40, 40)) ** -2, None)):
        found = found.detach().cpu().double().numpy()[:, 0]
        if ulps is None:  # exponentials of large numbers lose what these have of digits
            assert np.all(np.abs(found - exact) <= 1e-5 * exact + 1e-30)
        else:
            unit = np.spacing(np.abs(exact).astype(np.float32)).astype(np.float64)
            assert np.max(np.abs(found - exact) / unit) <= ulps


def test_values_that_are_not_finite(layer):
    x = inputs(2, (3, 3), "contiguous", torch.float32, 24).to(DEVICE)
    x[0, 0, 0, :] = torch.tensor([torch.inf, -torch.inf, torch.nan])
    grad = torch.randn_like(x)
    found = {}
    for backend in ("triton", "torch"):
        with nk.use_backend(backend):
            found[backend] = gradients(layer, x.clone().requires_grad_(), None, "none", grad)
    for mine, theirs in zip(*found.values(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_an_empty_batch(layer):
    with nk.use_backend("triton"):
        y = layer(torch.randn(0, 24, 3, 3, device=DEVICE, requires_grad=True))
    assert y.shape == (0, 24, 3, 3)
    y.sum().backward()
    assert all(not p.grad.any() for p in layer.parameters())


def test_launches(layer, started):
    """One forward. Backward one that writes dx, and one more only if something is learned."""
    x = inputs(2, (4, 4), "channels_last", torch.float32, 24).to(DEVICE).requires_grad_()
    with nk.use_backend("triton"):
        y = layer(x)
        assert started == [kernels.pointwise_kernel]
        y.sum().backward()
        if any(p.requires_grad for p in layer.parameters()):
            assert started[1:] == [
                kernels.pointwise_gradient_kernel,
                kernels.pointwise_total_kernel,
            ]
        else:
            assert started[1:] == [triton_kernels.input_gradient_kernel]
        started.clear()
        layer.requires_grad_(False)
        layer(x).sum().backward()
        assert len(started) == 2


@pytest.mark.parametrize("activation", ["none", "relu"])
def test_what_is_kept(layer, activation):
    """Not y; and x only where backward asks for it."""
    x = inputs(4, (8, 8), "channels_last", torch.float32, 24).to(DEVICE).requires_grad_()
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with (
        nk.use_backend("triton"),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        layer(x, activation=activation)
    mine = kept.pop(x.untyped_storage()._cdata, 0)
    learns = layer.card.name == "dyt" or any(p.requires_grad for p in layer.parameters())
    assert mine == (x.untyped_storage().nbytes() if learns or activation != "none" else 0)
    assert all(size <= 4 * 4 * 24 for size in kept.values())


@pytest.mark.parametrize("name", ["bn", "bgn", "frozen_bn"])
@pytest.mark.parametrize("activation", ["none", "silu"])
def test_statistics_may_change_before_the_backward(name, activation):
    results = []
    for change in (False, True):
        layer, x = make(name), torch.randn(3, 24, 4, 4, generator=torch.Generator().manual_seed(1))
        torch.manual_seed(3)
        with torch.no_grad():
            for table in (*layer.parameters(), *layer.buffers()):
                if table.is_floating_point():
                    table.copy_(torch.linspace(0.5, 1.5, table.numel()))
        x = x.to(DEVICE).requires_grad_()
        with nk.use_backend("triton"):
            y = layer(x, activation=activation)
            if change:
                for buffer in layer.buffers():
                    buffer.mul_(3)
            (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
            twice = torch.autograd.grad(dx.square().sum(), [x, *layer.parameters()])
        results.append([dx, *twice])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("activation", ["none", "silu"])
def test_the_backward_of_a_backward(layer, activation):
    x = inputs(3, (3, 2), "channels_last", torch.float32, 24).to(DEVICE)
    residual, grad = torch.randn_like(x), torch.randn_like(x)

    def penalty():
        a, r, g = (t.clone().requires_grad_() for t in (x, residual, grad))
        y = layer(a, r, activation)
        own = list(layer.parameters())
        first = torch.autograd.grad(y, [a, r, *own], g, create_graph=True)
        total = sum(t.square().sum() for t in first)
        further = torch.autograd.grad(total, [a, g, *own], allow_unused=True)
        return *first, *(torch.zeros(()) if t is None else t for t in further)

    for _ in range(2):  # the second time, a step that is replayed
        with nk.use_backend("triton"):
            found = penalty()
        with nk.use_backend("torch"):
            expected = penalty()
        for mine, theirs in zip(found, expected, strict=True):
            if theirs.dim() or mine.dim():
                torch.testing.assert_close(mine, theirs.expand_as(mine), rtol=1e-4, atol=1e-4)
        with nk.use_backend("triton"):
            layer(x.clone().requires_grad_(), residual, activation).sum().backward()


@pytest.mark.parametrize("activation", ["none", "silu"])
@pytest.mark.parametrize("which", ["parameters", "residual", "input"])
def test_gradients_of_some(layer, which, activation):
    """What needs none gets none, also from a replayed step, and an in-place ReLU may follow."""
    layer.requires_grad_(which == "parameters")
    for seed in range(3):
        results = []
        for backend in ("triton", "torch"):
            x, residual = given(seed), given(seed + 5)
            x.requires_grad_(which == "input")
            residual.requires_grad_(which == "residual")
            wanted = {"parameters": list(layer.parameters()), "input": [x], "residual": [residual]}
            with nk.use_backend(backend):
                y = torch.relu_(layer(x, residual, activation))
                if wanted[which]:
                    y.square().sum().backward()
            results.append([y, *(t.grad for t in wanted[which])])
            layer.zero_grad()
            assert all(t.grad is None for k, v in wanted.items() if k != which for t in v)
        for mine, theirs in zip(*results, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_many_gradients_at_once(layer):
    x = inputs(2, (3, 2), "contiguous", torch.float32, 24).to(DEVICE).requires_grad_()
    with nk.use_backend("triton"):
        y = layer(x)
        g = torch.randn_like(y)
        (one,) = torch.autograd.grad(y, x, g, retain_graph=True)
        (many,) = torch.autograd.grad(y, x, torch.stack([g, 2 * g]), is_grads_batched=True)
    torch.testing.assert_close(many, torch.stack([one, 2 * one]), rtol=1e-5, atol=1e-6)


def test_transforms_and_compilers_get_expressions(layer, started):
    torch._dynamo.reset()  # other tests compile the same forward for other layers, up to a limit
    x = inputs(2, (3, 2), "contiguous", torch.float32, 24).to(DEVICE)
    with nk.use_backend("triton"):
        found = torch.func.grad(lambda t: layer(t).square().sum())(x)
        y = torch.compile(layer, backend="eager", fullgraph=True)(x)
        assert "an expression" in nk.why(layer, x, compiled=True)
        mapped = torch.func.vmap(layer, in_dims=1, out_dims=1)(x[:, None])
    assert started == []
    expected = torch.func.grad(lambda t: layer(t).square().sum())(x)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(y, layer(x), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(mapped[:, 0], layer(x), rtol=1e-5, atol=1e-6)


def test_statistics_that_are_to_get_a_gradient_do():
    layer, x = make("bn"), torch.randn(3, 24, 4, 4, device=DEVICE)
    mean = torch.ones(24, device=DEVICE, requires_grad=True)
    grads = {}
    for backend in ("triton", "torch"):
        with nk.use_backend(backend):
            y = functional_call(layer, {"running_mean": mean}, (x,))
            grads[backend] = torch.autograd.grad(y.square().sum(), mean)[0]
    torch.testing.assert_close(*grads.values(), rtol=1e-5, atol=1e-4)
    layer.running_mean.requires_grad_()
    with nk.use_backend("triton"):
        assert "its statistics are to get a gradient" in nk.why(layer, x)


@pytest.mark.parametrize("name", ["bn", "dyt"])
def test_wide_tables_are_left_to_torch(name):
    layer, x = make(name).double(), torch.randn(3, 24, 4, 4, device=DEVICE)
    with nk.use_backend("triton"):
        assert "another size or type" in nk.why(layer, x)
        y = layer(x)
    torch.testing.assert_close(y.double(), layer(x.double()), rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------- replayed


@pytest.fixture
def extension():
    try:
        nk.build_extension()
    except DeviceError as error:
        pytest.skip(str(error))
    with nk.use_backend("triton"):
        yield


@COMPILER
@pytest.mark.parametrize("activation", ["none", "relu"])
def test_replayed_steps(layer, activation, extension):
    """From the second on; the numbers are those of the first way."""
    for seed in range(3):
        x = given(seed).requires_grad_()
        y = layer(x, None, activation)
        assert ("NormalizerStep" in y.grad_fn.name()) == (seed > 0)
        layer.zero_grad()
        y.square().sum().backward()
        made = [y, x.grad, *(p.grad for p in layer.parameters())]
        with nk.use_backend("torch"):
            other, own = copy.deepcopy(layer), given(seed).requires_grad_()
            other.zero_grad()
            z = other(own, None, activation)
            z.square().sum().backward()
        expected = [z, own.grad, *(p.grad for p in other.parameters())]
        for got, wanted in zip(made, expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=2e-5)


@COMPILER
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_replayed_forwards_without_gradients(layer, mode, extension, monkeypatch):
    with mode():
        first = layer(given(1))
        monkeypatch.setattr(pointwise, "write_map", None)
        assert torch.equal(layer(given(1)), first)
        with torch.no_grad():
            for table in (*layer.parameters(), *layer.buffers()):
                if table.is_floating_point():
                    table.mul_(2)  # looked up, not remembered
        replayed = layer(given(1))
        with nk.use_backend("torch"):
            torch.testing.assert_close(replayed, layer(given(1)), rtol=1e-5, atol=1e-5)
    monkeypatch.undo()
    with nk.use_backend("triton"):
        y = layer(given(1).requires_grad_())
    assert y.requires_grad  # a step of another kind


@COMPILER
@pytest.mark.parametrize("name", ["bn", "dyt"])
def test_what_is_learned_may_change(name, extension):
    """A step in which nothing is learned has no sums: it must not serve one in which it is."""
    layer = make(name)
    layer.requires_grad_(False)
    for _ in range(2):
        y = layer(given(1).requires_grad_())
        y.sum().backward()
    assert "NormalizerStep" in y.grad_fn.name()
    with torch.no_grad():
        layer(given(1))
    plans = len(layer._replays)
    for _ in range(3):
        assert not layer(given(1)).requires_grad
        assert len(layer._replays) == plans + 1
    layer.requires_grad_(True)
    for _ in range(2):
        layer.zero_grad()
        layer(given(1)).sum().backward()
        assert all(p.grad is not None and p.grad.any() for p in layer.parameters())
    for _ in range(3):
        layer.zero_grad()
        y = layer(given(1).requires_grad_())
        y.sum().backward()
        assert all(p.grad is not None and p.grad.any() for p in layer.parameters())
    assert "NormalizerStep" in y.grad_fn.name()
    layer.zero_grad()
    layer.requires_grad_(False)
    y = layer(given(1).requires_grad_())
    y.sum().backward()
    assert "NormalizerStep" in y.grad_fn.name()
    assert all(p.grad is None for p in layer.parameters())


@COMPILER
def test_buffers_that_are_given_get_their_gradient(extension):
    """Of a layer whose scale is a buffer: a recorded step has no gradient for it."""
    layer, weight = make("frozen_bn"), torch.full((24,), 2.0, device=DEVICE, requires_grad=True)
    for _ in range(2):
        layer(given(1).requires_grad_()).sum().backward()
    y = functional_call(layer, {"weight": weight}, (given(1).requires_grad_(),))
    (found,) = torch.autograd.grad(y.square().sum(), weight)
    with nk.use_backend("torch"):
        y = functional_call(layer, {"weight": weight}, (given(1).requires_grad_(),))
        (expected,) = torch.autograd.grad(y.square().sum(), weight)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)


@COMPILER
def test_a_replayed_fixed_map_keeps_nothing(extension):
    layer = make("frozen_bn")
    for seed in range(2):
        x = given(seed).requires_grad_() * 1
        y = layer(x)
        x.mul_(2)  # would be an error if it were kept
        y.sum().backward()
    assert "NormalizerStep" in y.grad_fn.name()


def test_outputs_that_are_made_again(layer, started):
    """In backward, of the statistics that there were."""
    conv, results = torch.nn.Conv2d(24, 2, 1).to(DEVICE), []
    tables = [buffer for buffer in layer.buffers() if buffer.is_floating_point()]
    with nk.use_backend("triton"):
        for remade in (False, True):
            for _ in range(2):
                x, residual = given(1).requires_grad_(), given(2)
                conv.zero_grad()
                with remaking.Remaking() if remade else torch.enable_grad():
                    y = layer(x, residual, "relu")
                    loss = conv(y).square().sum()
                for table in tables:
                    table.mul_(2)
                del y
                started.clear()
                loss.backward()
                maps = {triton_kernels.affine_kernel, kernels.pointwise_kernel}
                assert bool(maps & set(started)) == remade
                for table in tables:
                    table.div_(2)
            results.append([x.grad, *(p.grad.clone() for p in conv.parameters())])
    for mine, theirs in zip(*results, strict=True):
        assert torch.equal(mine, theirs)


def test_outputs_are_made_again_where_the_norm_has_no_gradient(started):
    """As behind a frozen stem: the convolution after it would keep them."""
    layer, conv = make("frozen_bn"), torch.nn.Conv2d(24, 2, 1).to(DEVICE)
    with nk.use_backend("triton"):
        with remaking.Remaking():
            y = layer(given(1))
            loss = conv(y).square().sum()
        del y
        started.clear()
        loss.backward()
    assert started == [triton_kernels.affine_kernel]
