"""Pools that a program holds: one launch each way, and the numbers of the three-launch way."""

from __future__ import annotations

import copy

import pytest
import torch

import normkit as nk
from cases import inputs
from normkit.core.fusion import Pool
from normkit.core.statistics import LayerState

pytest.importorskip("triton", reason="Triton is not installed")
from normkit.engine import remaking
from normkit.engine.families import held
from normkit.engine.triton import launch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# a layer, the samples and positions of its input: a group of three channels; several pools in a
# program, the last of which has less than others; a pool in one program; one value a channel
HELD = {
    "gn-odd": (nk.GN(9, groups=3), 3, (5, 3)),
    "gn-many": (nk.GN(12, groups=6), 2, (4, 4)),
    "gn-plain": (nk.GN(8, groups=2, affine=False), 1, (7, 7)),
    "ln": (nk.LN(8), 3, (2, 2)),
    "in": (nk.IN(20), 3, (7, 7)),
    "bn": (nk.BN(20), 5, (7, 7)),
    "bn-plain": (nk.BN(12, affine=False), 4, (2, 3)),
    "bn-pixel": (nk.BN(8), 6, (1, 1)),
    "bn-one": (nk.BN(8), 1, (3, 3)),
    "bgn": (nk.BGN(8, groups=8), 3, (3, 3)),
}


@pytest.fixture(params=HELD.values(), ids=HELD.keys())
def case(request):
    layer, samples, spatial = request.param
    layer = copy.deepcopy(layer).to(DEVICE)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.uniform_(0.5, 1.5)
    return layer, samples, spatial


@pytest.fixture
def launches(monkeypatch):
    """The names of kernels, as they are started."""
    started = []
    call = launch.Launch.__call__

    def counted(self, *tensors):
        started.append(self.kernel.__name__)
        return call(self, *tensors)

    monkeypatch.setattr(launch.Launch, "__call__", counted)
    monkeypatch.setenv("NORMKIT_CPP", "0")
    return started


def step(layer, x, residual, activation, grad):
    wanted = [x, residual, *layer.parameters()]
    y = layer(x, residual, activation)
    return y, *torch.autograd.grad(y, wanted, grad)


@pytest.mark.parametrize("memory", ["contiguous", "channels_last"])
@pytest.mark.parametrize("activation", ["none", "silu"])
def test_one_launch_each_way_and_the_same_numbers(case, memory, activation, launches):
    layer, samples, spatial = case
    exact = copy.deepcopy(layer).double()
    x = (inputs(samples, spatial, memory, torch.float32, layer.channels) * 3 + 7).to(DEVICE)
    residual, grad = torch.randn_like(x), torch.randn_like(x)
    with nk.use_backend("triton"):
        found = step(layer, x.requires_grad_(), residual.requires_grad_(), activation, grad)
    with nk.use_backend("torch"):
        wide = [t.detach().double().requires_grad_() for t in (x, residual)]
        truth = step(exact, *wide, activation, grad.double())
    kernels = [name for name in launches if name != "rows_kernel"]  # adds up gradients of samples
    assert kernels == ["held_map_kernel", "held_gradient_kernel"]
    assert found[0].stride() == x.stride()
    for mine, theirs in zip(found, truth, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-4, atol=1e-5)
    for mine, theirs in zip(layer.buffers(), exact.buffers(), strict=True):
        torch.testing.assert_close(mine.double(), theirs.double(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("memory", ["contiguous", "channels_last"])
def test_what_is_made_again_is_equal_to_the_last_bit(case, memory):
    layer, samples, spatial = case
    x = (inputs(samples, spatial, memory, torch.bfloat16, layer.channels) + 3).to(DEVICE)
    residual = torch.randn_like(x)
    with nk.use_backend("triton"), remaking.Remaking():
        y = layer(x.requires_grad_(), residual, "relu")
        [offer] = remaking._active.offers.values()
        assert torch.equal(offer.node.make(x.detach(), residual), y)


def test_equal_values_have_no_variance(case):
    layer, samples, spatial = case
    layer.eps = 1e-20  # what is left would be seen
    x = torch.full((samples, layer.channels, *spatial), 1e6 + 0.3125, device=DEVICE)
    layer.weight, layer.bias = None, None
    layer.affine = False
    with nk.use_backend("triton"):
        assert not layer(x).any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_pool_is_seen_and_alone(bad, launches):
    """In its own values, and in no other pool's."""
    x = torch.randn(3, 8, 3, 3, device=DEVICE)
    x[1, 2, 0, 0] = bad
    with nk.use_backend("triton"):
        y = nk.GN(8, groups=4, affine=False).to(DEVICE)(x)
    assert launches == ["held_map_kernel"]
    hit = torch.zeros_like(y, dtype=torch.bool)
    hit[1, 2:4] = True
    assert not y[hit].isfinite().any()
    assert y[~hit].isfinite().all()


def test_pools_that_are_too_large_take_three_launches(launches):
    x = torch.randn(1, 2, 130, 130, device=DEVICE).requires_grad_()
    with nk.use_backend("triton"):
        nk.IN(2).to(DEVICE)(x).sum().backward()
    assert not any("held" in name for name in launches)
    assert "moments_kernel" in launches


@pytest.mark.parametrize(
    ("layer", "shape", "channels_last"),
    [
        # eight channels of bfloat16 side by side are half of what memory gives at least, and
        # sixteen of them are too many for a program
        (nk.GN(256, groups=32), (2, 256, 56, 56), True),
        (nk.GN(256, groups=32), (2, 256, 56, 56), False),  # 8 · 3136 values
        (nk.BN(64), (256, 64, 14, 14), True),
        (nk.BN(64), (256, 64, 14, 14), False),
        (nk.LN(1024), (2, 1024, 14, 14), True),
        (nk.BatchRenorm(8), (2, 8, 3, 3), True),  # has more to do
        (nk.BGN(8, groups=2), (2, 8, 3, 3), False),  # groups of channels of the batch
    ],
)
def test_what_is_not_held(layer, shape, channels_last):
    x = torch.empty(shape, device="meta", dtype=torch.bfloat16)
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
    fusion = layer.fusion(x, LayerState(True, dict(layer.named_buffers()), True))
    assert isinstance(fusion, Pool)
    assert held.holding(x, fusion, layer.cells(x)) is None


def test_tiles_are_of_their_size():
    """No tile has more than so many values, and columns no fewer bytes than memory gives."""
    for rows in (1, 2, 32, 128, 512):
        for positions in (1, 16, 49, 64, 196, 784, 3136):
            for channels, groups in ((64, 32), (512, 32), (2048, 32), (96, 12), (64, 64)):
                for kind, extent in (
                    ("sample", (rows, positions, channels)),
                    ("sample", (rows * channels, positions)),
                    ("batch", (1, rows * positions, channels)),
                    ("batch", (rows * channels, positions)),
                ):
                    last = len(extent) == 3
                    many = 1 if kind == "batch" and last else rows
                    found = held._holding(extent, many, channels, groups, kind, 2)
                    if found is None:
                        continue
                    _, in_rows, _, deep, high, pools, wide = found.tile
                    assert high * pools * wide <= held.LARGEST
                    assert in_rows == (not last)
                    assert found.blocks * pools >= groups
                    if last:
                        assert min(pools, groups) * deep * 2 >= held.SECTOR or pools >= groups


def test_a_forward_that_is_held_before_a_backward_that_is_not(launches):
    """28 × 28 maps of a group of sixteen channels: x is held, x and dy would be too much."""
    x = torch.randn(1, 32, 28, 28, device=DEVICE).to(memory_format=torch.channels_last)
    layer = nk.GN(32, groups=2).to(DEVICE)
    exact = copy.deepcopy(layer).double()
    grad = torch.randn_like(x)
    residual = torch.randn_like(x)
    with nk.use_backend("triton"):
        found = step(layer, x.requires_grad_(), residual.requires_grad_(), "silu", grad)
    assert launches[0] == "held_map_kernel"
    assert "sums_kernel" in launches
    with nk.use_backend("torch"):
        wide = [t.detach().double().requires_grad_() for t in (x, residual)]
        truth = step(exact, *wide, "silu", grad.double())
    for mine, theirs in zip(found, truth, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-4, atol=1e-5)
