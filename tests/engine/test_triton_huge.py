"""Tensors of more than 2³¹ elements: offsets need 64 bits. What lies beyond is looked at."""

from __future__ import annotations

import copy

import pytest
import torch

import normkit as nk

pytest.importorskip("triton", reason="Triton is not installed")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = (2, 8, 9, 7)  # the same test where kernels are interpreted
HUGE = (2, 8, 11_600, 11_600)
ROOM = 40 * 2**30  # bytes: x, dy, y, dx and their references
TOLERANCE = {"rtol": 2**-7, "atol": 2**-7}  # the last bit of bfloat16
SIZES = [
    pytest.param(SMALL, id="small"),
    pytest.param(HUGE, id="huge", marks=pytest.mark.gpu),
]


def of_batch(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.batch_norm(x, None, None, training=True)


def of_pixels(x: torch.Tensor) -> torch.Tensor:
    """Positional norm: mean and variance of the channels at each position."""
    var, mean = torch.var_mean(x, 1, keepdim=True, correction=0)
    return (x - mean) * (var + 1e-5).rsqrt()


CASES = {
    # layer, what it does to a part, and the last part that is normalized by itself
    "bn": (nk.BN(8, affine=False), of_batch, (slice(None), slice(-1, None))),
    "in": (nk.IN(8, affine=False), of_batch, (slice(-1, None), slice(-1, None))),
    "pn": (nk.PN(8, affine=False), of_pixels, (slice(-1, None), slice(None), slice(-2, None))),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("memory", ["contiguous", "channels_last"])
@pytest.mark.parametrize("name", CASES)
def test_beyond_32_bits(name: str, memory: str, size: tuple[int, ...]) -> None:
    if size == HUGE:
        assert torch.Size(size).numel() > 2**31
        if torch.cuda.mem_get_info()[0] < ROOM:
            pytest.skip(f"needs {ROOM / 2**30:.0f} GiB of free GPU memory")
    layer, reference, part = CASES[name]
    layer = copy.deepcopy(layer).to(DEVICE)
    format = torch.channels_last if memory == "channels_last" else torch.contiguous_format
    x = torch.empty(size, device=DEVICE, dtype=torch.bfloat16, memory_format=format).normal_()
    x[-1, -1] += 3  # a part like no other
    x.requires_grad_()
    dy = torch.empty_like(x).normal_()
    with nk.use_backend("triton"):
        y = layer(x)
        y.backward(dy)
    assert x.grad is not None
    alone = x.detach()[part].float().requires_grad_()
    expected = reference(alone)
    expected.backward(dy[part].float())
    torch.testing.assert_close(y.detach()[part].float(), expected.detach(), **TOLERANCE)
    torch.testing.assert_close(x.grad[part].float(), alone.grad, **TOLERANCE)
