"""Positional normalization as Triton kernels: one read and one write forward; backward one read of
dy and x and one write of dx.

A tensor is B blocks of L pixels with C channels each. Either the channels of a pixel lie side by
side (LAST; then B = 1), or the pixels of a channel do. A tile is CHANNELS × PIXELS of one block and
holds all channels; if there are too many for that, see triton_pixel_turns.

With x̂ = (x − mean)·r, r = 1/√(Σ(x − mean)²/divisor + ε) and g the gradient before the activation:

    dx = r·(γg − Σγg/C − x̂·Σγg·x̂/divisor)

C and L come as C/V and V, and L/W and W, powers of two that divide them, so that the compiler knows
where lines of memory start. Offsets are 64-bit, arithmetic is float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from normkit.engine.triton_kernels import _before as before


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
    if ACT == 1:
        out = tl.where(out > 0, out, tl.where(out != out, out, 0.0))
    if ACT == 2:
        out = out * tl.sigmoid(out)
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
