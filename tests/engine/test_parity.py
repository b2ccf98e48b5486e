"""The backend against its specification, over shapes that nobody thought of."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import normkit as nk
from cases import ACTIVATION
from normkit.core.layout import Batch, Channels, Pieces, Pixels
from normkit.core.pieces import cut
from normkit.engine import dispatch, plain
from normkit.engine.epilogue import AffineMap
from normkit.engine.torch import passes as torch_passes

SPATIAL = st.lists(st.integers(1, 6), max_size=3).map(tuple)


def tensor(data, n, channels, size):
    x = torch.randn(n, channels, *size, dtype=torch.float64)
    if size and data.draw(st.booleans(), label="channels_last"):
        x = x.movedim(1, -1).contiguous().movedim(-1, 1)
    return x


def layouts(data, x):
    positions = x[0, 0].numel()
    divisors = [s for s in range(1, positions + 1) if positions % s == 0]
    groups = data.draw(st.integers(1, x[0].numel()), label="groups")
    pieces = cut(x.shape[1], positions, groups, x.device)
    return {
        "channels": Channels(x),
        "strips": Channels(x, data.draw(st.sampled_from(divisors), label="strips")),
        "batch": Batch(x),
        "pixels": Pixels(x),
        "pieces": Pieces(x, pieces.piece, pieces.size),
    }


@pytest.mark.parametrize("kind", ["channels", "strips", "batch", "pixels", "pieces"])
@pytest.mark.parametrize("activation", ["none", "relu", "silu"])
@given(data=st.data(), n=st.integers(1, 5), channels=st.integers(1, 7), size=SPATIAL)
@settings(max_examples=25)
def test_backend_equals_specification(kind, activation, data, n, channels, size):
    """All four passes, every layout, any shape; and the specification equals autograd."""
    x = tensor(data, n, channels, size)
    if kind == "batch":
        x = x.movedim(1, -1).contiguous().movedim(-1, 1)
        assume(Batch.fits(x))
    layout = layouts(data, x)[kind]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_passes, "TILE", data.draw(st.sampled_from([1 << 20, 40, 6])))
        check_passes(data, x, layout, activation)


def check_passes(data, x, layout, activation):
    mean, var = torch_passes.moments(x, layout)
    expected = plain.moments(x, layout)
    torch.testing.assert_close((mean, var), expected)
    scale, *rest, constant, slope = (torch.randn_like(mean) for _ in range(5))
    shift, center = (t if data.draw(st.booleans()) else None for t in rest)
    residual = torch.randn_like(x) if data.draw(st.booleans()) else None
    map = AffineMap(scale, shift, center, residual, activation)
    y = torch_passes.affine(x, map, layout)
    torch.testing.assert_close(y, plain.affine(x, map, layout))
    assert y.stride() == x.stride()
    grad = torch.randn_like(y)
    found = torch_passes.sums(grad, x, map, layout, residual is not None)
    torch.testing.assert_close(found, plain.sums(grad, x, map, layout, residual is not None))
    dx = torch_passes.input_gradient(grad, x, map, constant, slope, layout)
    spec = plain.input_gradient(grad, x, map, constant, slope, layout)
    torch.testing.assert_close(dx, spec)

    def whole(x, scale, shift):
        return plain.affine(x, AffineMap(scale, shift, center, residual, activation), layout)

    _, vjp = torch.func.vjp(whole, x, scale, torch.zeros_like(mean) if shift is None else shift)
    torch.testing.assert_close(found[:2], vjp(grad)[1:])


@given(data=st.data(), n=st.integers(1, 6), size=SPATIAL, name=st.sampled_from(ACTIVATION))
@settings(max_examples=200)
def test_layers_equal_their_expression(data, n, size, name):
    """The whole layer: passes with a handwritten gradient, against one differentiable expression.

    A layer that refuses a shape must refuse it both ways.
    """
    layer = nk.make(name, 8, dtype=torch.float64)
    twin = copy.deepcopy(layer)
    x = tensor(data, n, 8, size)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    grad = torch.randn_like(x)
    try:
        y = layer(a)
    except ValueError:
        with pytest.raises(ValueError, match=r"expects|has"), expression():
            twin(b)
        return
    with expression():
        z = twin(b)
    torch.testing.assert_close(y, z)
    y.backward(grad)
    z.backward(grad)
    torch.testing.assert_close(a.grad, b.grad)
    for mine, other in zip(layer.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)
    for mine, other in zip(layer.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(mine, other)


def expression():
    """Lets the engine write an expression, as it does for a compiler."""
    patch = pytest.MonkeyPatch.context()

    class Patched:
        def __enter__(self):
            patch.__enter__().setattr(dispatch, "looked_into", lambda: True)

        def __exit__(self, *error):
            patch.__exit__(*error)

    return Patched()
