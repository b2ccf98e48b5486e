"""The Triton kernels: in Triton's interpreter here, on the device where there is one."""

from __future__ import annotations

import copy

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import normkit as nk
from cases import FORMATS, build, every, inputs, label
from normkit.core.layout import Batch, Channels, Pixels
from normkit.engine import plain
from normkit.engine.epilogue import AffineMap
from normkit.engine.torch import passes as torch_passes
from normkit.errors import OptionError

triton = pytest.importorskip("triton", reason="Triton is not installed")
triton_passes = pytest.importorskip("normkit.engine.triton.passes")
triton_forms = pytest.importorskip("normkit.engine.triton.forms")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ACTIVATIONS = ("none", "relu", "silu")
SHAPES = {
    "vector": (5, 6),
    "map": (3, 5, 4, 6),
    "odd": (2, 3, 7, 7),
    "one": (1, 8, 1, 1),
    "wide": (2, 131, 2, 2),
    "long": (1, 3, 67, 71),  # more positions than a tile
}


@pytest.fixture(autouse=True)
def _nan_in_new_memory():
    """An element that no kernel writes stays NaN and is found."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def layouts(x):
    found = [Channels(x), Pixels(x)]
    positions = x[0, 0].numel()
    if positions % 7 == 0:
        found.append(Channels(x, 7))
    return [*found, Batch(x)] if Batch.fits(x) else found


def both(x):
    yield x
    if x.dim() > 2:
        yield x.movedim(1, -1).contiguous().movedim(-1, 1)


def no_worse(found, reference, truth, terms, depth):
    """At most twice the error of the torch backend, both against float64, plus rounding.

    Rounding is what float32 arithmetic may do: eps times the size of the terms that are added,
    for each addition that stands behind the other. Only in the interpreter also one rounding of
    the output's type, since it cuts bits off where the device rounds.
    """
    eps = torch.finfo(torch.float32).eps
    mine, theirs = ((t.double() - truth).norm() for t in (found, reference))
    cut = torch.finfo(found.dtype).eps if DEVICE == "cpu" else 0
    assert mine <= 2 * theirs + depth * eps * terms.norm() + cut * truth.norm()


def additions(layout, x):
    """How many additions stand behind each other in a reduction: turns of a lane, then a tree."""
    form = triton_passes.form_of(tuple(layout.view(x).shape))
    return form.positions / form.tile_positions + form.tile_positions.bit_length() + 2


MAP = 4  # product, shift, residual, activation


# every shape, and with narrow types, which change what is read and written, two of them; every
# type with every activation
GRID = [
    pytest.param(shape, dtype, ACTIVATIONS[(i + j) % 3], id=f"{name}-{dtype}")
    for i, (name, shape) in enumerate(SHAPES.items())
    for j, dtype in enumerate(DTYPES)
    if dtype == torch.float32 or name in ("vector", "map", "odd")
]


@pytest.mark.parametrize(("shape", "dtype", "activation"), GRID)
def test_passes(shape, dtype, activation):
    for x in both((2 * torch.randn(shape, device=DEVICE) + 0.5).to(dtype)):
        for layout in layouts(x):
            check_reductions_and_maps(x, layout, activation)


def check_reductions_and_maps(x, layout, activation):
    wide, depth = x.double(), additions(layout, x)
    size = plain.moments(wide.abs(), layout)[0], plain.moments(wide, layout)[1]
    found = zip(
        triton_passes.moments(x, layout),
        torch_passes.moments(x, layout),
        plain.moments(wide, layout),
        (size[0], size[1] + size[0].square()),
        strict=True,
    )
    for mine, theirs, truth, terms in found:
        no_worse(mine, theirs, truth, terms, depth)
    a, b, c, c0, c1 = (torch.randn(layout.rows, layout.columns, device=DEVICE) for _ in range(5))
    grad = torch.randn_like(x)
    for residual in (None, torch.randn_like(x)):
        map = AffineMap(a, b, c, residual, activation)
        exact = AffineMap(*(doubled(t) for t in map[:4]), activation)
        sizes = AffineMap(*(doubled(t, absolute=True) for t in map[:4]))
        sizes = sizes._replace(center=-sizes.center)
        y = triton_passes.affine(x, map, layout)
        assert y.stride() == x.stride()
        assert y.dtype == x.dtype
        theirs = torch_passes.affine(x, map, layout)
        truth, terms = plain.affine(wide, exact, layout), plain.affine(wide.abs(), sizes, layout)
        no_worse(y, theirs, truth, terms, MAP)
        keep = residual is not None
        found = zip(
            triton_passes.sums(grad, x, map, layout, keep),
            torch_passes.sums(grad, x, map, layout, keep),
            plain.sums(grad.double(), wide, exact, layout, keep),
            plain.sums(grad.double().abs(), wide.abs(), sizes, layout, keep),
            strict=True,
        )
        for mine, theirs, truth, terms in found:
            assert (mine is None) == (theirs is None)
            if mine is not None:
                no_worse(mine, theirs, truth, terms, depth + MAP)
        # what the moments add comes after the residual, and does not know of it
        for extra in ((None, None), (c0, None), (c0, c1))[2 * keep :]:
            mine = triton_passes.input_gradient(grad, x, map, *extra, layout)
            theirs = torch_passes.input_gradient(grad, x, map, *extra, layout)
            exact_extra = [doubled(t) for t in extra]
            truth = plain.input_gradient(grad.double(), wide, exact, *exact_extra, layout)
            size_extra = [doubled(t, absolute=True) for t in extra]
            terms = plain.input_gradient(
                grad.double().abs(), wide.abs(), sizes, *size_extra, layout
            )
            no_worse(mine, theirs, truth, terms, 2 * MAP)


def doubled(table, absolute=False):
    if table is None:
        return None
    return table.double().abs() if absolute else table.double()


def test_moments_do_not_cancel():
    """A mean far from zero, and a first tile unlike the rest: neither may spoil the variance."""
    x = 4096 + torch.randn(1, 4, 3000, device=DEVICE)
    x[:, :, :100] = 0
    for laid in both(x):
        for layout in (Channels(laid), *([Batch(laid)] if Batch.fits(laid) else [])):
            mean, var = triton_passes.moments(laid, layout)
            exact = plain.moments(laid.double(), layout)
            torch.testing.assert_close(mean.double(), exact[0], rtol=1e-6, atol=0)
            torch.testing.assert_close(var.double(), exact[1], rtol=1e-5, atol=0)


def test_short_rows():
    """Rows of 49 values, of which no vector of values is a part, are read as runs."""
    x = (2 * torch.randn(2, 48, 7, 7, device=DEVICE) + 3).bfloat16()
    layout = Channels(x)
    assert triton_forms.form_of(layout.extent).flat is not None
    check_reductions_and_maps(x, layout, "silu")
    with nk.use_backend("triton"):  # a map that samples share
        y = nk.BN(48).to(DEVICE)(x)
    exact = torch.nn.functional.batch_norm(x.double(), None, None, training=True)
    torch.testing.assert_close(y.double(), exact, rtol=2e-2, atol=2e-2)


def test_only_a_map_behind_its_reduction_reads_ahead():
    """A map that starts before the kernel in front has ended must not read what that one writes,
    such as a copy of x in other memory."""
    x = torch.randn(2, 8, 4, 4, device=DEVICE)
    layout, tables, started = Channels(x), torch.ones(3 * 16, device=DEVICE), []

    class Recorded(triton_passes.Launch):
        def __call__(self, *tensors):
            started.append(self.alone)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_passes, "Launch", Recorded)
        triton_passes._affine.cache_clear()
        for reduced, given in ((True, x), (False, x), (True, x.mT)):
            triton_passes.apply_map(given, tables, 16, None, "none", layout, reduced=reduced)
    triton_passes._affine.cache_clear()
    assert started == [False, True, True]


def test_many_splits(monkeypatch):
    """Cells cut into parts, the last one shorter, merge to the same moments and sums."""
    monkeypatch.setattr(triton_passes, "_multiprocessors", lambda device: 4)
    monkeypatch.setattr(triton_forms, "TILE", 64)
    triton_passes.form_of.cache_clear()
    triton_forms.reduction_of.cache_clear()
    try:
        x = torch.randn(2, 3, 37, 11, device=DEVICE)
        for laid in both(x):
            for layout in layouts(laid):
                form = triton_passes.form_of(tuple(layout.view(laid).shape))
                torch.testing.assert_close(
                    triton_passes.moments(laid, layout), plain.moments(laid, layout)
                )
                a = torch.randn(layout.rows, layout.columns, device=DEVICE)
                args = (laid, laid, AffineMap(a, a, act="relu"), layout, False)
                for mine, theirs in zip(triton_passes.sums(*args), plain.sums(*args), strict=True):
                    if mine is not None:
                        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
                splits, span = triton_forms.reduction_of(form, 4)[:2]
                assert (splits - 1) * span < form.positions <= splits * span
        assert splits > 1
    finally:
        triton_passes.form_of.cache_clear()
        triton_forms.reduction_of.cache_clear()


SERVED = [c for c in every() if not (c[0] == "bgn" and c[1].get("groups") == 5)]


# both memories for every layer; options in turn
MEMORIES = [
    (case, memory)
    for i, case in enumerate(SERVED)
    for memory in (FORMATS if not case[1] else FORMATS[i % 2 :][:1])
]


@pytest.mark.parametrize(("case", "memory"), MEMORIES, ids=label)
def test_layers_equal_the_torch_backend(case, memory):
    layer = build(case, torch.float32).to(DEVICE)
    twin = copy.deepcopy(layer)
    x = inputs(memory=memory, dtype=torch.float32).to(DEVICE)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    grad = torch.randn_like(x)
    with nk.use_backend("triton"):
        y = layer(a, activation="relu")
        y.backward(grad)
    with nk.use_backend("torch"):
        z = twin(b, activation="relu")
        z.backward(grad)
    torch.testing.assert_close(y, z, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-4)
    for mine, other in zip(layer.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


class TestChoice:
    def test_a_cpu_tensor_runs_on_torch(self):
        said = nk.why(nk.GN(8), torch.randn(2, 8, 4, 4))
        # in C++ where that part has been built, by an earlier test or program
        assert said in ("gn runs on torch, because the tensor is on cpu.", "gn runs in C++.")

    def test_forcing(self):
        x = torch.randn(2, 8, 4, 4, device=DEVICE)
        layer = nk.BN(8).to(DEVICE)
        with nk.use_backend("triton"):
            assert nk.why(layer, x) == "bn runs on triton (forced), fused."
        with nk.use_backend("torch"):
            assert nk.why(layer, x) == "bn runs on torch, because use_backend('torch') is in force."

    def test_what_cannot_be_served_is_an_error(self):
        """And nothing changes: the layer's buffers, or the backend after the block."""
        uneven, x = nk.BGN(8, groups=5).to(DEVICE), torch.randn(2, 8, 4, 4, device=DEVICE)
        double = nk.BN(8, dtype=torch.float64).to(DEVICE)
        with nk.use_backend("triton"):
            said = nk.why(uneven, x)
            with pytest.raises(OptionError, match=r"groups cut channels unevenly.*'auto'"):
                uneven(x)
            with pytest.raises(OptionError, match=r"torch\.float64"):
                double(x.double())
        assert said.endswith("Triton is asked for, but groups cut channels unevenly.")
        assert uneven.num_batches_tracked == 0
        uneven(x)

    def test_weights(self):
        weight = torch.randn(8, 3, 3, 3, device=DEVICE)
        with nk.use_backend("triton"):
            assert nk.why(nk.WS(8), weight) == "ws runs on triton (forced), fused."
        assert nk.why(nk.WS(8), weight.cpu()) == "ws runs on torch, because the tensor is on cpu."
        for layer in (nk.WS(8, scale=False), nk.WN(8)):
            assert nk.why(layer, weight).endswith(
                "runs on torch, because there is no kernel for it."
            )
        long = torch.randn(8, 9000)
        assert nk.why(nk.WS(8), long).endswith("because a filter has more than 8192 weights.")

    def test_a_norm_with_its_activation_and_what_is_no_layer(self):
        x = torch.randn(2, 8, 4, 4)
        assert nk.why(nk.NormAct(nk.BN(8)), x) == nk.why(nk.BN(8), x)
        with pytest.raises(OptionError, match="layer of normkit, got BatchNorm2d"):
            nk.why(torch.nn.BatchNorm2d(8), x)

    def test_unknown(self):
        with pytest.raises(OptionError, match="'triton'"):
            nk.use_backend("tritn")

    def test_as_a_plain_call(self):
        try:
            nk.use_backend("torch")
            assert "in force" in nk.why(nk.BN(8), torch.randn(2, 8))
        finally:
            nk.use_backend("auto")
        assert "in force" not in nk.why(nk.BN(8), torch.randn(2, 8))


@pytest.mark.parametrize("name", nk.names("activation"))
def test_fake_tensors_launch_nothing(name, monkeypatch):
    """On a GPU they have the address 0, and kernels would write there."""
    monkeypatch.setattr(triton_passes, "_multiprocessors", lambda device: 132)
    with FakeTensorMode():
        layer = nk.make(name, 8, device="cuda")
        x = torch.empty(4, 8, 5, 5, device="cuda")
        for training in (True, False):
            y = layer.train(training)(x, torch.empty_like(x), "relu")
            assert y.shape == x.shape
            assert y.is_cuda
