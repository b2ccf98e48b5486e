"""Positional normalization as a whole: two passes forward, three backward.

One launch forward. Backward one, and a small one that adds up the parts of γ's and β's gradients.

A tensor is B blocks of L pixels with C channels each. Either the channels of a pixel lie side by
side (LAST; then B = 1), or the pixels of a channel do. A tile is CHANNELS × PIXELS of one block and
holds all channels; if there are too many, they come in turns: the first time from memory, later
from the cache.

With x̂ = (x − mean)·r, r = 1/√(Σ(x − mean)²/divisor + ε) and g the gradient before the activation:

    dx = r·(γg − Σγg/C − x̂·Σγg·x̂/divisor)

C and L come as C/V and V, and L/W and W, powers of two that divide them, so that the compiler knows
where lines of memory start. Offsets are 64-bit, arithmetic is float32.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from normkit.core.fusion import Pixel
from normkit.core.layout import Pixels
from normkit.engine import plain, remaking
from normkit.engine.activations import NUMBERS
from normkit.engine.dispatch import looked_into_backward
from normkit.engine.families.pixel_kernels import (
    parameter_gradient_kernel,
    pixel_gradient_kernel,
    pixel_map_kernel,
    pixel_turns_gradient_kernel,
    pixel_turns_map_kernel,
)
from normkit.engine.replay.record import RecordedStep, Recording
from normkit.engine.triton import forms, passes
from normkit.engine.triton.launch import Launch


class PixelPass(NamedTuple):
    """What positional normalization does, beside its tensors."""

    eps: float
    correction: int  # 1: unbiased variance
    act: str
    layout: Pixels


def fused_pixels(
    x: Tensor,
    description: Pixel,
    residual: Tensor | None,
    act: str,
    record: RecordedStep | None = None,
) -> Tensor:
    """activation(weight · (x − mean)/√(var + eps) + bias + residual), statistics of each pixel. A
    ``record`` is told what a step launches."""
    eps, correction, weight, bias = description
    how = PixelPass(eps, correction, act, Pixels.of(x))
    if torch.is_grad_enabled():
        return _Fused.apply(x, weight, bias, residual, how, record)
    recording = None
    if record is not None:
        recording = Recording(record.inputs(x, residual, (weight, bias)))
    with recording or nullcontext():
        y = write_map(x, weight, bias, residual, how)
    if recording is not None and record is not None:
        record.forward_alone(recording, x, y, nothing_learned=False)
    return y


class _Fused(torch.autograd.Function):
    """Keeps x alone: the statistics are computed again where x has to be read anyway."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        pixel: PixelPass,
        record: RecordedStep | None,
    ) -> Any:
        recording, kept = None, None
        if record is not None:
            recording = Recording(record.inputs(x, residual, (weight, bias)))
        with recording or nullcontext():
            y = write_map(x, weight, bias, residual, pixel)
            if recording is not None:  # the backward needs no tables, but a step has some
                kept = passes.table(x, 1)
        ctx.save_for_backward(x, weight, bias, residual if pixel.act != "none" else None, kept)
        remaking.offer(y, x, residual, lambda x, r: write_map(x, weight, bias, r, pixel))
        if recording is not None and record is not None and kept is not None:
            if any(ctx.needs_input_grad):
                record = record.with_forward(recording, y, kept, remake=[None])
            else:
                record.forward_alone(recording, x, y, nothing_learned=True)
        ctx.pixel, ctx.record = pixel, record
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        x, weight, bias, residual, kept = ctx.saved_tensors
        if looked_into_backward(grad):
            needs, (eps, correction, act, _) = ctx.needs_input_grad, ctx.pixel
            again = plain.pixels_again(eps, correction, act, (True, True))
            wanted = needs[0], needs[3], *needs[1:3]
            dx, dr, dweight, dbias = again(x, residual, (weight, bias), kept, grad, wanted)
            return dx, dweight, dbias, dr, None, None
        pixel, record, recording = ctx.pixel, ctx.record, None
        grad = pixel.layout.aligned(grad)
        if record is not None:
            own = [p for p in (weight, bias) if p is not None]
            recording = Recording([x, residual, *own, kept, grad])
        with recording or nullcontext():
            dr = grad if ctx.needs_input_grad[3] else None
            dx, keep, found = write_gradients(
                grad, x, weight, bias, residual, pixel, dr is not None and pixel.act != "none"
            )
        dr = dr if keep is None else keep
        if recording is not None:
            there = weight is not None, bias is not None
            again = plain.pixels_again(pixel.eps, pixel.correction, pixel.act, there)
            record.finish(recording, x, grad, dx, dr, found, again)
            ctx.record = None  # a graph that is kept comes here again
        dweight, dbias = found or (None, None)
        if weight is not None and dweight is not None and dbias is not None:
            dweight, dbias = dweight.to(weight.dtype), dbias.to(weight.dtype)
        return dx, dweight, dbias, dr, None, None


# ---------------------------------------------------------------- launches


TILE = 2048  # values: backward keeps several tensors of them in registers
SIDE_BY_SIDE = 16  # pixels of a tile at least where they are neighbours: a sector of memory
MOST = 1024  # channels of a tile where they are not neighbours,
MOST_LAST = 8192  # and where they are
TILES = 16  # that one program of the backward goes through at most

Sizes = tuple[int, int, int, bool]


def write_map(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    pixel: PixelPass,
) -> Tensor:
    eps, correction, act, layout = pixel
    y = passes.like(layout, x)
    start = _map(_sizes(layout), eps, correction, (weight is not None, act, residual is not None))
    rest = None if residual is None else layout.aligned(residual)
    start(layout.aligned(x), weight, bias, rest, y)
    return y


def write_gradients(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    pixel: PixelPass,
    through: bool,
) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
    """dx; the residual's gradient where it goes ``through`` an activation; and those of weight and
    bias, if there are any, in float32."""
    eps, correction, act, layout = pixel
    dx = passes.like(layout, x)
    keep = passes.like(layout, x) if through else None
    start, reduce, programs = _gradient(
        _sizes(layout),
        eps,
        correction,
        (weight is not None, act, residual is not None, keep is not None),
        passes._multiprocessors(x.device),
    )
    channels = x.shape[1]
    parts = None if weight is None else passes.table(x, 2 * programs * channels)
    rest = None if residual is None else layout.aligned(residual)
    start(layout.aligned(grad), layout.aligned(x), weight, bias, rest, keep, dx, parts)
    if parts is None:
        return dx, keep, ()
    found = passes.table(x, 2 * channels)
    reduce(parts, found)
    return dx, keep, (found[:channels], found[channels:])


def _sizes(layout: Pixels) -> Sizes:
    """Blocks, channels, pixels of a block, and whether channels are neighbours in memory."""
    n, c = layout.shape[:2]
    if layout.channels_last or layout.positions == 1:
        return 1, c, n * layout.positions, True
    return n, c, layout.positions, False


class _Form(NamedTuple):
    kernels: tuple[Any, Any]  # of the map and of the gradient
    tiles: int  # of a block
    channels: int  # of a tile
    pixels: int
    warps: int


def _form(channels: int, pixels: int, last: bool) -> _Form:
    """All channels in one tile if they fit, else in turns."""
    wide = passes.power_of_two(channels)
    least, size, most = (1, TILE, MOST_LAST) if last else (SIDE_BY_SIDE, 2 * TILE, MOST)
    fits = wide <= most
    if not fits:
        wide = size // least
    high = min(passes.power_of_two(pixels), max(least, size // wide))
    warps = min(16, max(4, wide * high // 512))
    kernels = (
        (pixel_map_kernel, pixel_gradient_kernel)
        if fits
        else (pixel_turns_map_kernel, pixel_turns_gradient_kernel)
    )
    return _Form(kernels, -(-pixels // high), wide, high, warps)


@lru_cache(maxsize=1024)
def _map(sizes: Sizes, eps: float, correction: int, flags: tuple[bool, str, bool]) -> Launch:
    blocks, channels, pixels, last = sizes
    affine, act, residual = flags
    form = _form(channels, pixels, last)
    divisors, numbers = _numbers(channels, pixels, eps, correction)
    constants = affine, NUMBERS[act], residual, last, *divisors, *form[2:4]
    kernel, grid = form.kernels[0], (blocks * form.tiles,)
    return Launch(kernel, grid, (form.tiles, *numbers), constants, form.warps)


@lru_cache(maxsize=1024)
def _gradient(
    sizes: Sizes,
    eps: float,
    correction: int,
    flags: tuple[bool, str, bool, bool],
    multiprocessors: int,
) -> tuple[Launch, Launch, int]:
    """The gradient, the sum of its parts, and how many parts there are."""
    blocks, channels, pixels, last = sizes
    affine, act, residual, keep = flags
    form = _form(channels, pixels, last)
    tiles = blocks * form.tiles
    span = max(1, min(TILES, tiles // (multiprocessors * forms.PROGRAMS)))
    programs = -(-tiles // span)
    divisors, numbers = _numbers(channels, pixels, eps, correction)
    constants = affine, NUMBERS[act], residual, keep, last, *divisors, *form[2:4]
    numbers = form.tiles, tiles, span, *numbers
    kernel = form.kernels[1]
    start = Launch(kernel, (programs,), numbers, constants, form.warps)
    width, depth = 8, min(passes.power_of_two(programs), 256)
    reduce = Launch(
        parameter_gradient_kernel,
        (-(-channels // width), 2),
        (programs, channels),
        (depth, width),
    )
    return start, reduce, programs


def _numbers(
    channels: int, pixels: int, eps: float, correction: int
) -> tuple[tuple[int, int], tuple[Any, ...]]:
    """V and W; c_turns, l_turns, divisor and eps."""
    shared = math.gcd(channels, 16), math.gcd(pixels, 16)
    turns = channels // shared[0], pixels // shared[1]
    return shared, (*turns, float(channels - correction), eps)
