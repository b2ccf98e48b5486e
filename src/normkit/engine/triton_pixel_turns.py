"""Positional normalization with more channels than a tile holds: they come in turns.

As triton_pixels, except that the channels of a pixel are gone through more than once: the first
time they come from memory, later from the cache.
"""

from __future__ import annotations

import triton
import triton.language as tl

from normkit.engine import triton_pixels as pixels


@triton.jit
def turn(first, start, pixel, C, L, LAST: tl.constexpr, CHANNELS: tl.constexpr):
    """Channels, offsets and mask of a tile."""
    channel = first + tl.arange(0, CHANNELS)[:, None]
    at = pixels.offsets(start, channel, pixel, C, L, LAST)
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
        middle, inside = pixels.centred(value, mask, count)
        seen = tl.cast(first, tl.float32)
        share = count / (seen + count)
        apart = middle - mean
        mean += apart * share
        square += inside + apart * apart * seen * share
    return mean, 1.0 / tl.sqrt(square / divisor + eps)


@triton.jit
def pixel_map_kernel(
    x, weight, bias, residual, y, tiles, c_turns, l_turns, divisor, eps,
    AFFINE: tl.constexpr, ACT: tl.constexpr, RESIDUAL: tl.constexpr,
    LAST: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
    CHANNELS: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """activation(γ·x̂ + β + residual)."""
    C, L = c_turns * V, l_turns * W
    start, pixel = pixels.place(tl.program_id(0), tiles, C, L, PIXELS)
    mean, r = statistics(x, start, pixel, C, L, divisor, eps, LAST, CHANNELS, PIXELS)
    for first in range(0, C, CHANNELS):
        channel, at, mask = turn(first, start, pixel, C, L, LAST, CHANNELS)
        hat = (tl.load(x + at, mask=mask, other=0.0).to(tl.float32) - mean) * r
        pixels.finish(hat, at, mask, weight, bias, residual, y, channel, C, AFFINE, ACT, RESIDUAL)


@triton.jit
def pixel_gradient_kernel(
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
        start, pixel = pixels.place(tile, tiles, C, L, PIXELS)
        mean, r = statistics(x, start, pixel, C, L, divisor, eps, LAST, CHANNELS, PIXELS)
        total = tl.zeros((1, PIXELS), tl.float32)
        along = tl.zeros((1, PIXELS), tl.float32)
        for first in range(0, C, CHANNELS):
            channel, at, mask = turn(first, start, pixel, C, L, LAST, CHANNELS)
            value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
            hat = tl.where(mask, (value - mean) * r, 0.0)
            g = pixels.gradient_of(
                dy, hat, at, mask, weight, bias, residual, channel, C, AFFINE, ACT, RESIDUAL
            )
            if KEEP:
                tl.store(kept + at, g.to(kept.dtype.element_ty), mask=mask)
            if AFFINE:
                by_weight, by_bias = pixels.own_parts(parts, channel, C)
                again = channel < tl.where(tile > begin, C, 0)
                before_weight = tl.load(by_weight, mask=again, other=0.0)
                before_bias = tl.load(by_bias, mask=again, other=0.0)
                tl.debug_barrier()  # nobody reads what another thread has written already
                dweight = before_weight + tl.sum(g * hat, 1)[:, None]
                tl.store(by_weight, dweight, mask=channel < C)
                tl.store(by_bias, before_bias + tl.sum(g, 1)[:, None], mask=channel < C)
                g = g * pixels.of_channels(weight, channel, C)
            total += tl.sum(g, 0)[None, :]
            along += tl.sum(g * hat, 0)[None, :]
        tl.debug_barrier()  # the parts are read again by other threads
        for first in range(0, C, CHANNELS):
            channel, at, mask = turn(first, start, pixel, C, L, LAST, CHANNELS)
            hat = (tl.load(x + at, mask=mask, other=0.0).to(tl.float32) - mean) * r
            g = pixels.gradient_of(
                dy, hat, at, mask, weight, bias, residual, channel, C, AFFINE, ACT, RESIDUAL
            )
            if AFFINE:
                g = g * pixels.of_channels(weight, channel, C)
            out = (g - total / C - hat * along / divisor) * r
            tl.store(dx + at, out.to(dx.dtype.element_ty), mask=mask)
