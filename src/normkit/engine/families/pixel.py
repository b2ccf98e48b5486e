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
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from normkit.core.fusion import Pixel
from normkit.core.layout import Pixels
from normkit.engine import plain, remaking
from normkit.engine.activations import NUMBERS
from normkit.engine.replay.record import RecordedStep, Recording
from normkit.engine.triton import forms, passes
from normkit.engine.triton.activations import activate, before
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
        ctx.save_for_backward(x, weight, bias, residual if pixel.act != "none" else None)
        recording = None
        if record is not None:
            recording = Recording(record.inputs(x, residual, (weight, bias)))
        with recording or nullcontext():
            y = write_map(x, weight, bias, residual, pixel)
        remaking.offer(y, x, residual, lambda x, r: write_map(x, weight, bias, r, pixel))
        if recording is not None and record is not None:
            if any(ctx.needs_input_grad):  # the backward needs no tables
                kept = x if weight is None else weight
                record = record.with_forward(recording, y, kept, remake=[None])
            else:
                record.forward_alone(recording, x, y, nothing_learned=True)
        ctx.pixel, ctx.record = pixel, record
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        x, weight, bias, residual = given = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *_again(ctx.pixel, ctx.needs_input_grad[:4], grad, given), None, None
        pixel, record, recording = ctx.pixel, ctx.record, None
        grad = pixel.layout.aligned(grad)
        if record is not None:
            own = [p for p in (weight, bias) if p is not None]
            recording = Recording([x, residual, *own, x if weight is None else weight, grad])
        with recording or nullcontext():
            dr = grad if ctx.needs_input_grad[3] else None
            dx, keep, found = write_gradients(
                grad, x, weight, bias, residual, pixel, dr is not None and pixel.act != "none"
            )
        dr = dr if keep is None else keep
        if recording is not None:
            record.finish(recording, x, grad, dx, dr, found, _looked_into(pixel))
        dweight, dbias = found or (None, None)
        if weight is not None and dweight is not None and dbias is not None:
            dweight, dbias = dweight.to(weight.dtype), dbias.to(weight.dtype)
        return dx, dweight, dbias, dr, None, None


def _looked_into(pixel: PixelPass) -> Callable[..., Any]:
    """The backward of a replayed step where someone looks into it."""

    def again(
        x: Tensor,
        residual: Tensor | None,
        parameters: Sequence[Tensor],
        kept: Tensor,
        grad: Tensor,
        needs: Sequence[bool],
    ) -> list[Tensor | None]:
        weight, bias = parameters or (None, None)
        of_x, of_residual, *learned = needs
        wanted = of_x, *(learned or (False, False)), of_residual
        further = torch.is_grad_enabled()
        with torch.enable_grad():
            dx, dweight, dbias, dr = _again(
                pixel, wanted, grad, (x, weight, bias, residual), further
            )
        return [dx, dr, *((dweight, dbias) if parameters else ())]

    return again


def _again(
    pixel: PixelPass, needs: Sequence[bool], grad: Tensor, given: Any, further: bool = True
) -> list[Tensor | None]:
    """The backward of a backward: through the plain expression, which autograd differentiates."""
    wanted = [t for t, need in zip(given, needs, strict=True) if need and t is not None]
    x, weight, bias, residual = given
    y = plain.pixels(x, weight, bias, residual, pixel.eps, pixel.correction, pixel.act)
    flowing = iter(torch.autograd.grad(y, wanted, grad, create_graph=further))
    back = [
        next(flowing) if need and t is not None else None
        for t, need in zip(given, needs, strict=True)
    ]
    if needs[3] and given[3] is None:  # it was not kept, for nothing follows the sum
        back[3] = grad
    return back


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


# ---------------------------------------------------------------- kernels


@triton.jit
def place(tile, tiles, C, L, PIXELS: tl.constexpr):
    """Where the block of a tile begins in memory, and the tile's pixels, (1, PIXELS)."""
    pixel = tl.cast(tile % tiles, tl.int64) * PIXELS + tl.arange(0, PIXELS)
    return tl.cast(tile // tiles, tl.int64) * C * L, pixel[None, :]


@triton.jit
def offsets(start, channel, pixel, C, L, LAST: tl.constexpr):
    """(CHANNELS, PIXELS), of channels (CHANNELS, 1) and pixels (1, PIXELS)."""
    if LAST:
        return pixel * C + channel
    return start + channel.to(tl.int64) * L + pixel


@triton.jit
def own_parts(parts, channel, C):
    """Where a program's parts of the gradients of γ and β go."""
    own = parts + tl.cast(tl.program_id(0), tl.int64) * C + channel
    return own, own + tl.cast(tl.num_programs(0), tl.int64) * C


@triton.jit
def of_channels(table, channel, C):
    return tl.load(table + channel, mask=channel < C, other=0.0).to(tl.float32)


@triton.jit
def centred(value, mask, count):
    """Mean over the channels of a tile, and the sum of squares about it, (1, PIXELS)."""
    mean = tl.sum(value, 0)[None, :] / count
    apart = tl.where(mask, value - mean, 0.0)
    return mean, tl.sum(apart * apart, 0)[None, :]


@triton.jit
def affine(hat, weight, bias, channel, C, AFFINE: tl.constexpr):
    if AFFINE:
        return hat * of_channels(weight, channel, C) + of_channels(bias, channel, C)
    return hat


@triton.jit
def finish(
    hat, at, mask, weight, bias, residual, y, channel, C,
    AFFINE: tl.constexpr, ACT: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Writes activation(γ·x̂ + β + residual)."""
    out = affine(hat, weight, bias, channel, C, AFFINE)
    if RESIDUAL:
        out += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
    out = activate(out, ACT)
    tl.store(y + at, out.to(y.dtype.element_ty), mask=mask)


@triton.jit
def gradient_of(
    dy, hat, at, mask, weight, bias, residual, channel, C,
    AFFINE: tl.constexpr, ACT: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """g: the gradient before the activation."""
    g = tl.load(dy + at, mask=mask, other=0.0).to(tl.float32)
    if ACT != 0:
        pre = affine(hat, weight, bias, channel, C, AFFINE)
        if RESIDUAL:
            pre += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
        g = before(g, pre, ACT)
    return g


@triton.jit
def pixel_map_kernel(
    x, weight, bias, residual, y, tiles, c_turns, l_turns, divisor, eps,
    AFFINE: tl.constexpr, ACT: tl.constexpr, RESIDUAL: tl.constexpr,
    LAST: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
    CHANNELS: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """activation(γ·x̂ + β + residual) of one tile; ``tiles`` in each block."""
    C, L = c_turns * V, l_turns * W
    start, pixel = place(tl.program_id(0), tiles, C, L, PIXELS)
    channel = tl.arange(0, CHANNELS)[:, None]
    mask = (channel < C) & (pixel < L)
    at = offsets(start, channel, pixel, C, L, LAST)
    value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    mean, square = centred(value, mask, C)
    hat = (value - mean) * (1.0 / tl.sqrt(square / divisor + eps))
    finish(hat, at, mask, weight, bias, residual, y, channel, C, AFFINE, ACT, RESIDUAL)


@triton.jit
def pixel_gradient_kernel(
    dy, x, weight, bias, residual, kept, dx, parts,
    tiles, all_tiles, span, c_turns, l_turns, divisor, eps,
    AFFINE: tl.constexpr, ACT: tl.constexpr, RESIDUAL: tl.constexpr, KEEP: tl.constexpr,
    LAST: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
    CHANNELS: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """dx of ``span`` tiles, g where a residual needs it (KEEP), and this program's part of the
    gradients of γ and β: parts (2, programs, C)."""
    C, L = c_turns * V, l_turns * W
    channel = tl.arange(0, CHANNELS)[:, None]
    gamma = of_channels(weight, channel, C) if AFFINE else 1.0
    # where pixels are spread over warps, the sum over them waits until the end
    wide: tl.constexpr = PIXELS if LAST else 1
    dweight = tl.zeros((CHANNELS, wide), tl.float32)
    dbias = tl.zeros((CHANNELS, wide), tl.float32)
    begin = tl.program_id(0) * span
    for tile in range(begin, tl.minimum(begin + span, all_tiles)):
        start, pixel = place(tile, tiles, C, L, PIXELS)
        mask = (channel < C) & (pixel < L)
        at = offsets(start, channel, pixel, C, L, LAST)
        value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        mean, square = centred(value, mask, C)
        r = 1.0 / tl.sqrt(square / divisor + eps)
        hat = tl.where(mask, (value - mean) * r, 0.0)
        g = gradient_of(
            dy, hat, at, mask, weight, bias, residual, channel, C, AFFINE, ACT, RESIDUAL
        )
        if KEEP:
            tl.store(kept + at, g.to(kept.dtype.element_ty), mask=mask)
        if AFFINE:
            dweight += g * hat if LAST else tl.sum(g * hat, 1)[:, None]
            dbias += g if LAST else tl.sum(g, 1)[:, None]
        g = g * gamma
        mean_g = tl.sum(g, 0)[None, :] / C
        along = tl.sum(g * hat, 0)[None, :] / divisor
        out = (g - mean_g - hat * along) * r
        tl.store(dx + at, out.to(dx.dtype.element_ty), mask=mask)
    if AFFINE:
        by_weight, by_bias = own_parts(parts, channel, C)
        tl.store(by_weight, tl.sum(dweight, 1)[:, None], mask=channel < C)
        tl.store(by_bias, tl.sum(dbias, 1)[:, None], mask=channel < C)


@triton.jit
def parameter_gradient_kernel(parts, out, programs, C, DEPTH: tl.constexpr, WIDTH: tl.constexpr):
    """The sum over all programs of parts (2, programs, C); program id 1 is which of the two."""
    channel = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    which = tl.program_id(1)
    table = parts + tl.cast(which, tl.int64) * programs * C
    total = tl.zeros((DEPTH, WIDTH), tl.float32)
    for start in range(0, programs, DEPTH):
        program = start + tl.arange(0, DEPTH)
        mask = (program < programs)[:, None] & (channel < C)[None, :]
        at = program.to(tl.int64)[:, None] * C + channel[None, :]
        total += tl.load(table + at, mask=mask, other=0.0)
    tl.store(out + which * C + channel, tl.sum(total, 0), mask=channel < C)


@triton.jit
def turn(first, start, pixel, C, L, LAST: tl.constexpr, CHANNELS: tl.constexpr):
    """Channels, offsets and mask of a tile."""
    channel = first + tl.arange(0, CHANNELS)[:, None]
    at = offsets(start, channel, pixel, C, L, LAST)
    return channel, at, (channel < C) & (pixel < L)


@triton.jit
def statistics(
    x, start, pixel, C, L, divisor, eps,
    LAST: tl.constexpr, CHANNELS: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """Mean and r of pixels; turns are merged about their common mean."""
    mean = tl.zeros((1, PIXELS), tl.float32)
    square = tl.zeros((1, PIXELS), tl.float32)
    for first in range(0, C, CHANNELS):
        _, at, mask = turn(first, start, pixel, C, L, LAST, CHANNELS)
        value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        count = tl.cast(tl.minimum(C - first, CHANNELS), tl.float32)
        middle, inside = centred(value, mask, count)
        seen = tl.cast(first, tl.float32)
        share = count / (seen + count)
        apart = middle - mean
        mean += apart * share
        square += inside + apart * apart * seen * share
    return mean, 1.0 / tl.sqrt(square / divisor + eps)


@triton.jit
def pixel_turns_map_kernel(
    x, weight, bias, residual, y, tiles, c_turns, l_turns, divisor, eps,
    AFFINE: tl.constexpr, ACT: tl.constexpr, RESIDUAL: tl.constexpr,
    LAST: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
    CHANNELS: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """activation(γ·x̂ + β + residual)."""
    C, L = c_turns * V, l_turns * W
    start, pixel = place(tl.program_id(0), tiles, C, L, PIXELS)
    mean, r = statistics(x, start, pixel, C, L, divisor, eps, LAST, CHANNELS, PIXELS)
    for first in range(0, C, CHANNELS):
        channel, at, mask = turn(first, start, pixel, C, L, LAST, CHANNELS)
        hat = (tl.load(x + at, mask=mask, other=0.0).to(tl.float32) - mean) * r
        finish(hat, at, mask, weight, bias, residual, y, channel, C, AFFINE, ACT, RESIDUAL)


@triton.jit
def pixel_turns_gradient_kernel(
    dy, x, weight, bias, residual, kept, dx, parts,
    tiles, all_tiles, span, c_turns, l_turns, divisor, eps,
    AFFINE: tl.constexpr, ACT: tl.constexpr, RESIDUAL: tl.constexpr, KEEP: tl.constexpr,
    LAST: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
    CHANNELS: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """dx, g where a residual needs it, and parts (2, programs, C) of the gradients of γ and β,
    which grow in memory from tile to tile."""
    C, L = c_turns * V, l_turns * W
    begin = tl.program_id(0) * span
    for tile in range(begin, tl.minimum(begin + span, all_tiles)):
        start, pixel = place(tile, tiles, C, L, PIXELS)
        mean, r = statistics(x, start, pixel, C, L, divisor, eps, LAST, CHANNELS, PIXELS)
        total = tl.zeros((1, PIXELS), tl.float32)
        along = tl.zeros((1, PIXELS), tl.float32)
        for first in range(0, C, CHANNELS):
            channel, at, mask = turn(first, start, pixel, C, L, LAST, CHANNELS)
            value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
            hat = tl.where(mask, (value - mean) * r, 0.0)
            g = gradient_of(
                dy, hat, at, mask, weight, bias, residual, channel, C, AFFINE, ACT, RESIDUAL
            )
            if KEEP:
                tl.store(kept + at, g.to(kept.dtype.element_ty), mask=mask)
            if AFFINE:
                by_weight, by_bias = own_parts(parts, channel, C)
                again = channel < tl.where(tile > begin, C, 0)
                before_weight = tl.load(by_weight, mask=again, other=0.0)
                before_bias = tl.load(by_bias, mask=again, other=0.0)
                tl.debug_barrier()  # nobody reads what another thread has written already
                dweight = before_weight + tl.sum(g * hat, 1)[:, None]
                tl.store(by_weight, dweight, mask=channel < C)
                tl.store(by_bias, before_bias + tl.sum(g, 1)[:, None], mask=channel < C)
                g = g * of_channels(weight, channel, C)
            total += tl.sum(g, 0)[None, :]
            along += tl.sum(g * hat, 0)[None, :]
        tl.debug_barrier()  # the parts are read again by other threads
        for first in range(0, C, CHANNELS):
            channel, at, mask = turn(first, start, pixel, C, L, LAST, CHANNELS)
            hat = (tl.load(x + at, mask=mask, other=0.0).to(tl.float32) - mean) * r
            g = gradient_of(
                dy, hat, at, mask, weight, bias, residual, channel, C, AFFINE, ACT, RESIDUAL
            )
            if AFFINE:
                g = g * of_channels(weight, channel, C)
            out = (g - total / C - hat * along / divisor) * r
            tl.store(dx + at, out.to(dx.dtype.element_ty), mask=mask)
