"""The kernels of positional normalization: see pixel.py."""

from __future__ import annotations

import triton
import triton.language as tl

from normkit.engine.triton.activations import activate, before


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
