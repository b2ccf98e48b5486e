"""What the engine promises about memory: how often it is read, written and kept."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import normkit as nk
from cases import FORMATS, build, every, inputs, label, within
from normkit.engine.torch import passes as torch_passes

FAMILY = [case for case in every() if build(case).card.family]
PASSES = ("moments", "affine", "sums", "input_gradient")


@pytest.fixture
def count(monkeypatch):
    """How often each pass of the backend runs."""
    seen = dict.fromkeys(PASSES, 0)

    def counting(name, function):
        def call(*args, **kwargs):
            seen[name] += 1
            return function(*args, **kwargs)

        return call

    for name in PASSES:
        monkeypatch.setattr(torch_passes, name, counting(name, getattr(torch_passes, name)))
    with nk.use_backend("torch"):
        yield seen


class FullSize(TorchDispatchMode):
    """Counts the operations that bring a new tensor of at least a given size into being."""

    def __init__(self, size):
        super().__init__()
        self.size, self.made = size, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tensors((args, kwargs))}
        for tensor in tensors(out):
            if tensor.numel() >= self.size and tensor.untyped_storage()._cdata not in given:
                self.made.append(str(function))
        return out


def tensors(tree):
    return [t for t in torch.utils._pytree.tree_leaves(tree) if isinstance(t, torch.Tensor)]


@pytest.mark.parametrize("memory", FORMATS)
@pytest.mark.parametrize("case", FAMILY, ids=label)
def test_three_passes_forward_and_five_backward(case, memory, count):
    """One call each: moments reads x; affine reads x, writes y; sums reads dy and x; the input
    gradient reads dy and x, writes dx."""
    layer = build(case)
    moments = int(layer.uses_moments())
    y = layer(inputs(memory=memory).requires_grad_(), activation="relu")
    assert count == {"moments": moments, "affine": 1, "sums": 0, "input_gradient": 0}
    y.sum().backward()
    sums = int(moments or any(p.requires_grad for p in layer.parameters()))
    assert count == {"moments": moments, "affine": 1, "sums": sums, "input_gradient": 1}


@pytest.mark.parametrize("case", FAMILY, ids=label)
def test_eval_mode_skips_what_it_does_not_need(case, count):
    layer = build(case).eval()
    with torch.no_grad():
        layer(inputs())
    assert count["affine"] == 1
    assert count["moments"] == int(layer.uses_moments())
    if case[0] in ("bn", "ghost_bn", "batch_renorm", "shifted_bn", "bgn", "frozen_bn"):
        assert count["moments"] == 0


@within(activation=("none", "relu"), memory=FORMATS)
@pytest.mark.parametrize("case", FAMILY, ids=label)
def test_only_x_is_kept_for_backward(case, activation, memory):
    """Beside small tables: not x̂, not y, not a mask."""
    layer = build(case)
    x = inputs(8, (16, 16), memory).requires_grad_()
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(x, activation=activation)
    whole = x.untyped_storage().nbytes()
    mine = kept.pop(x.untyped_storage()._cdata, 0)
    learns = layer.uses_moments() or any(p.requires_grad for p in layer.parameters())
    assert mine == (whole if learns or activation != "none" else 0)  # a fixed map keeps nothing
    assert max(kept.values()) <= whole / 16


@within(memory=FORMATS)
@pytest.mark.parametrize("case", FAMILY, ids=label)
def test_no_hidden_copies(case, memory, monkeypatch):
    """Forward makes one tensor of x's size, y; backward one, dx. Tiles are smaller."""
    monkeypatch.setattr(torch_passes, "TILE", 1 << 10)
    layer = build(case)
    x = inputs(8, (16, 16), memory).requires_grad_()
    grad = torch.randn_like(x)
    with FullSize(x.numel()) as forward:
        y = layer(x)
    with FullSize(x.numel()) as backward:
        (dx,) = torch.autograd.grad(y, x, grad)
    assert len(forward.made) == 1, forward.made
    assert len(backward.made) == 1, backward.made
    assert dx.stride() == x.stride()


def test_tiles_do_not_change_the_numbers(monkeypatch):
    layer, x = nk.GN(8, dtype=torch.float64), inputs(7, (9, 5))
    whole = layer(x)
    for tile in (1, 64, 1000):
        monkeypatch.setattr(torch_passes, "TILE", tile)
        torch.testing.assert_close(layer(x), whole)
