"""A depthwise 3 × 3 convolution of a normalized map, and its way back, as three kernels.

With z = a·x + b inside the map and 0 around it, k the kernel, and s the gate (or 1):

    y[p] = Σ_t k[t]·z[p + t] + s·bias
    g[q] = Σ_t k[t]·dy[q − t]        dk[t] = Σ_q z[q]·dy[q − t]        dx = a·g + constant + slope·x

z is never stored, and neither is g: each kernel reads its neighbours again, from the cache. A
program goes through ``span`` positions of one sample, tile by tile, so that the rows above and
below have just been read. Offsets into a sample are 32-bit, those of samples 64-bit.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _place(p, channel, C, area, LAST: tl.constexpr):
    """Offsets (POSITIONS, CHANNELS) into a sample, channels_last (LAST) or contiguous."""
    if LAST:
        return p[:, None] * C + channel[None, :]
    return channel[None, :] * area + p[:, None]


@triton.jit
def _near(t, p, h, w, H, W, C, channel, known, DH: tl.constexpr, DW: tl.constexpr,
          LAST: tl.constexpr):  # fmt: skip
    """The values DH rows down and DW columns right, 0 outside the map; and where there are some."""
    down, right = h + DH, w + DW
    mask = ((down >= 0) & (down < H) & (right >= 0) & (right < W))[:, None] & known[None, :]
    at = _place(p + (DH * W + DW), channel, C, H * W, LAST)
    return tl.load(t + at, mask=mask, other=0.0).to(tl.float32), mask


@triton.jit
def _normalized(t, p, h, w, H, W, C, channel, known, a, b, DH: tl.constexpr, DW: tl.constexpr,
                LAST: tl.constexpr):  # fmt: skip
    value, mask = _near(t, p, h, w, H, W, C, channel, known, DH, DW, LAST)
    return tl.where(mask, value * a + b, 0.0)


@triton.jit
def _of_kernel(weight, channel, known, tap: tl.constexpr):
    return tl.load(weight + channel * 9 + tap, mask=known, other=0.0).to(tl.float32)[None, :]


@triton.jit
def depthwise_kernel(
    x, map, weight, bias, gates, y, H, W, C, period, span,
    BIAS: tl.constexpr, GATED: tl.constexpr, LAST: tl.constexpr,
    POSITIONS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """y: one read of x, one write."""
    sample = tl.program_id(2)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    known = channel < C
    entry = (sample * C + channel) % period
    a = tl.load(map + entry, mask=known, other=0.0)[None, :]
    b = tl.load(map + period + entry, mask=known, other=0.0)[None, :]
    start = sample.to(tl.int64) * C * H * W
    x += start
    y += start
    k0, k1 = _of_kernel(weight, channel, known, 0), _of_kernel(weight, channel, known, 1)
    k2, k3 = _of_kernel(weight, channel, known, 2), _of_kernel(weight, channel, known, 3)
    k4, k5 = _of_kernel(weight, channel, known, 4), _of_kernel(weight, channel, known, 5)
    k6, k7 = _of_kernel(weight, channel, known, 6), _of_kernel(weight, channel, known, 7)
    k8 = _of_kernel(weight, channel, known, 8)
    shift = a * 0.0
    if BIAS:
        shift += tl.load(bias + channel, mask=known, other=0.0).to(tl.float32)[None, :]
    if GATED:
        shift = shift * tl.load(gates + sample * C + channel, mask=known, other=0.0)[None, :]
    first = tl.program_id(0) * span
    last = tl.minimum(first + span, H * W)
    for begin in range(first, last, POSITIONS):
        p = begin + tl.arange(0, POSITIONS)
        h, w = p // W, p % W
        out = shift + k0 * _normalized(x, p, h, w, H, W, C, channel, known, a, b, -1, -1, LAST)
        out += k1 * _normalized(x, p, h, w, H, W, C, channel, known, a, b, -1, 0, LAST)
        out += k2 * _normalized(x, p, h, w, H, W, C, channel, known, a, b, -1, 1, LAST)
        out += k3 * _normalized(x, p, h, w, H, W, C, channel, known, a, b, 0, -1, LAST)
        out += k4 * _normalized(x, p, h, w, H, W, C, channel, known, a, b, 0, 0, LAST)
        out += k5 * _normalized(x, p, h, w, H, W, C, channel, known, a, b, 0, 1, LAST)
        out += k6 * _normalized(x, p, h, w, H, W, C, channel, known, a, b, 1, -1, LAST)
        out += k7 * _normalized(x, p, h, w, H, W, C, channel, known, a, b, 1, 0, LAST)
        out += k8 * _normalized(x, p, h, w, H, W, C, channel, known, a, b, 1, 1, LAST)
        at = _place(p, channel, C, H * W, LAST)
        mask = (p < H * W)[:, None] & known[None, :]
        tl.store(y + at, out.to(y.dtype.element_ty), mask=mask)


@triton.jit
def depthwise_sums_kernel(
    dy, x, map, weight, parts, taps, H, W, C, period, span,
    LAST: tl.constexpr, POSITIONS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Σ g·x and Σ g into parts (2, splits, N, C); dk and Σ dy into taps (10, splits, N, C): one
    read of dy and x."""
    split, sample = tl.program_id(0), tl.program_id(2)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    known = channel < C
    entry = (sample * C + channel) % period
    a = tl.load(map + entry, mask=known, other=0.0)[None, :]
    b = tl.load(map + period + entry, mask=known, other=0.0)[None, :]
    start = sample.to(tl.int64) * C * H * W
    x += start
    dy += start
    k0, k1 = _of_kernel(weight, channel, known, 0), _of_kernel(weight, channel, known, 1)
    k2, k3 = _of_kernel(weight, channel, known, 2), _of_kernel(weight, channel, known, 3)
    k4, k5 = _of_kernel(weight, channel, known, 4), _of_kernel(weight, channel, known, 5)
    k6, k7 = _of_kernel(weight, channel, known, 6), _of_kernel(weight, channel, known, 7)
    k8 = _of_kernel(weight, channel, known, 8)
    zero = tl.zeros((POSITIONS, CHANNELS), tl.float32)
    da, db, total = zero, zero, zero
    d0, d1, d2, d3, d4, d5, d6, d7, d8 = zero, zero, zero, zero, zero, zero, zero, zero, zero
    first = split * span
    last = tl.minimum(first + span, H * W)
    for begin in range(first, last, POSITIONS):
        p = begin + tl.arange(0, POSITIONS)
        h, w = p // W, p % W
        value, mask = _near(x, p, h, w, H, W, C, channel, known, 0, 0, LAST)
        z = tl.where(mask, value * a + b, 0.0)
        # tap t = (i, j) sees dy at q − t: the kernel turned around
        t, _ = _near(dy, p, h, w, H, W, C, channel, known, 1, 1, LAST)
        g = k0 * t
        d0 += z * t
        t, _ = _near(dy, p, h, w, H, W, C, channel, known, 1, 0, LAST)
        g += k1 * t
        d1 += z * t
        t, _ = _near(dy, p, h, w, H, W, C, channel, known, 1, -1, LAST)
        g += k2 * t
        d2 += z * t
        t, _ = _near(dy, p, h, w, H, W, C, channel, known, 0, 1, LAST)
        g += k3 * t
        d3 += z * t
        t, _ = _near(dy, p, h, w, H, W, C, channel, known, 0, 0, LAST)
        g += k4 * t
        d4 += z * t
        total += t
        t, _ = _near(dy, p, h, w, H, W, C, channel, known, 0, -1, LAST)
        g += k5 * t
        d5 += z * t
        t, _ = _near(dy, p, h, w, H, W, C, channel, known, -1, 1, LAST)
        g += k6 * t
        d6 += z * t
        t, _ = _near(dy, p, h, w, H, W, C, channel, known, -1, 0, LAST)
        g += k7 * t
        d7 += z * t
        t, _ = _near(dy, p, h, w, H, W, C, channel, known, -1, -1, LAST)
        g += k8 * t
        d8 += z * t
        g = tl.where(mask, g, 0.0)
        da += g * value
        db += g
    out = (split * tl.num_programs(2) + sample).to(tl.int64) * C + channel
    table = (tl.num_programs(0) * tl.num_programs(2)).to(tl.int64) * C
    tl.store(parts + out, tl.sum(da, 0), mask=known)
    tl.store(parts + table + out, tl.sum(db, 0), mask=known)
    tl.store(taps + out, tl.sum(d0, 0), mask=known)
    tl.store(taps + table + out, tl.sum(d1, 0), mask=known)
    tl.store(taps + 2 * table + out, tl.sum(d2, 0), mask=known)
    tl.store(taps + 3 * table + out, tl.sum(d3, 0), mask=known)
    tl.store(taps + 4 * table + out, tl.sum(d4, 0), mask=known)
    tl.store(taps + 5 * table + out, tl.sum(d5, 0), mask=known)
    tl.store(taps + 6 * table + out, tl.sum(d6, 0), mask=known)
    tl.store(taps + 7 * table + out, tl.sum(d7, 0), mask=known)
    tl.store(taps + 8 * table + out, tl.sum(d8, 0), mask=known)
    tl.store(taps + 9 * table + out, tl.sum(total, 0), mask=known)


@triton.jit
def depthwise_gradient_kernel(
    dy, x, map, weight, extra, dx, H, W, C, period, span,
    LAST: tl.constexpr, POSITIONS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """dx: one read of dy and x, one write."""
    sample = tl.program_id(2)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    known = channel < C
    entry = (sample * C + channel) % period
    a = tl.load(map + entry, mask=known, other=0.0)[None, :]
    constant = tl.load(extra + entry, mask=known, other=0.0)[None, :]
    slope = tl.load(extra + period + entry, mask=known, other=0.0)[None, :]
    start = sample.to(tl.int64) * C * H * W
    x += start
    dy += start
    dx += start
    k0, k1 = _of_kernel(weight, channel, known, 0), _of_kernel(weight, channel, known, 1)
    k2, k3 = _of_kernel(weight, channel, known, 2), _of_kernel(weight, channel, known, 3)
    k4, k5 = _of_kernel(weight, channel, known, 4), _of_kernel(weight, channel, known, 5)
    k6, k7 = _of_kernel(weight, channel, known, 6), _of_kernel(weight, channel, known, 7)
    k8 = _of_kernel(weight, channel, known, 8)
    first = tl.program_id(0) * span
    last = tl.minimum(first + span, H * W)
    for begin in range(first, last, POSITIONS):
        p = begin + tl.arange(0, POSITIONS)
        h, w = p // W, p % W
        g = k0 * _near(dy, p, h, w, H, W, C, channel, known, 1, 1, LAST)[0]
        g += k1 * _near(dy, p, h, w, H, W, C, channel, known, 1, 0, LAST)[0]
        g += k2 * _near(dy, p, h, w, H, W, C, channel, known, 1, -1, LAST)[0]
        g += k3 * _near(dy, p, h, w, H, W, C, channel, known, 0, 1, LAST)[0]
        g += k4 * _near(dy, p, h, w, H, W, C, channel, known, 0, 0, LAST)[0]
        g += k5 * _near(dy, p, h, w, H, W, C, channel, known, 0, -1, LAST)[0]
        g += k6 * _near(dy, p, h, w, H, W, C, channel, known, -1, 1, LAST)[0]
        g += k7 * _near(dy, p, h, w, H, W, C, channel, known, -1, 0, LAST)[0]
        g += k8 * _near(dy, p, h, w, H, W, C, channel, known, -1, -1, LAST)[0]
        value, mask = _near(x, p, h, w, H, W, C, channel, known, 0, 0, LAST)
        at = _place(p, channel, C, H * W, LAST)
        out = g * a + constant + value * slope
        tl.store(dx + at, out.to(dx.dtype.element_ty), mask=mask)
