"""The kernels of families/depthwise.py, which has the formulas.

A program owns COLUMNS × CHANNELS of one sample and slides down the rows: each row is read once
(three times, shifted, but then from the cache), and what it gives to the three rows it touches is
carried along in two accumulators. The row after is loaded before the current one is worked on.
Offsets into a sample are 32-bit, those of samples 64-bit.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _there(row, column, first, last, W):
    """Which columns of a row are on the map, if the row is one of first … last − 1."""
    rows = row + column * 0
    return (column >= 0) & (column < W) & (rows >= first) & (rows < last)


@triton.jit
def _place(row, column, channel, H, W, C, LAST: tl.constexpr):
    """Offsets (COLUMNS, CHANNELS) into a sample, channels_last (LAST) or contiguous."""
    p = row * W + column
    if LAST:
        return p[:, None] * C + channel[None, :]
    return channel[None, :] * (H * W) + p[:, None]


@triton.jit
def _row(t, row, column, channel, known, first, last, H, W, C, LAST: tl.constexpr):
    """One row of a map, with 0 where there is none."""
    mask = _there(row, column, first, last, W)[:, None] & known[None, :]
    return tl.load(t + _place(row, column, channel, H, W, C, LAST), mask=mask, other=0.0)


@triton.jit
def _store(t, value, row, column, channel, known, first, last, H, W, C, LAST: tl.constexpr):
    mask = _there(row, column, first, last, W)[:, None] & known[None, :]
    at = _place(row, column, channel, H, W, C, LAST)
    tl.store(t + at, value.to(t.dtype.element_ty), mask=mask)


@triton.jit
def _mapped(value, a, b, c, row, column, first, last, W):
    """z: the map, but 0 where there is no value to map."""
    there = _there(row, column, first, last, W)
    return tl.where(there[:, None], (value.to(tl.float32) - c) * a + b, 0.0)


@triton.jit
def _tap(weight, channel, known, tap: tl.constexpr):
    return tl.load(weight + channel * 9 + tap, mask=known, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _taps(weight, channel, known):
    return (
        _tap(weight, channel, known, 0),
        _tap(weight, channel, known, 1),
        _tap(weight, channel, known, 2),
        _tap(weight, channel, known, 3),
        _tap(weight, channel, known, 4),
        _tap(weight, channel, known, 5),
        _tap(weight, channel, known, 6),
        _tap(weight, channel, known, 7),
        _tap(weight, channel, known, 8),
    )


@triton.jit
def totals_kernel(
    taps, gates, bias, out, N, C, splits,
    GATED: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """From the parts (10, splits, N, C) of what each tap and dy have summed: the gradients of the
    kernel (C, 9) and the bias (C), and with GATED those of the gates (N, C)."""
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    known = (channel < C)[None, :]
    rows = N * splits
    size = tl.cast(rows, tl.int64) * C
    for tap in tl.static_range(9):
        total = tl.zeros((ROWS, CHANNELS), tl.float32)
        for start in range(0, rows, ROWS):
            row = start + tl.arange(0, ROWS)
            at = row.to(tl.int64)[:, None] * C + channel[None, :]
            mask = (row < rows)[:, None] & known
            total += tl.load(taps + tap * size + at, mask=mask, other=0.0)
        tl.store(out + channel * 9 + tap, tl.sum(total, 0), mask=channel < C)
    shift = tl.zeros((1, CHANNELS), tl.float32)
    if GATED:
        shift = tl.load(bias + channel, mask=channel < C, other=0.0).to(tl.float32)[None, :]
    total = tl.zeros((ROWS, CHANNELS), tl.float32)
    for start in range(0, N, ROWS):
        sample = start + tl.arange(0, ROWS)
        mask = (sample < N)[:, None] & known
        own = sample.to(tl.int64)[:, None] * C + channel[None, :]
        value = tl.zeros((ROWS, CHANNELS), tl.float32)
        for split in range(splits):
            at = tl.cast(split * N, tl.int64) * C + own
            value += tl.load(taps + 9 * size + at, mask=mask, other=0.0)
        if GATED:
            tl.store(out + 10 * C + own, value * shift, mask=mask)
            value = value * tl.load(gates + own, mask=mask, other=0.0)
        total += value
    tl.store(out + 9 * C + channel, tl.sum(total, 0), mask=channel < C)


@triton.jit
def depthwise_kernel(
    x, map, weight, bias, gates, y, H, W, C, period, high, wide,
    BIAS: tl.constexpr, GATED: tl.constexpr, LAST: tl.constexpr,
    COLUMNS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """y: one read of x, one write. A program does ``high`` rows; ``wide`` of them stand abreast."""
    sample = tl.program_id(2)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    known = channel < C
    column = tl.program_id(0) % wide * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.program_id(0) // wide * high
    last = tl.minimum(first + high, H)
    entry = (sample * C + channel) % period
    a = tl.load(map + entry, mask=known, other=0.0)[None, :]
    b = tl.load(map + period + entry, mask=known, other=0.0)[None, :]
    c = tl.load(map + 2 * period + entry, mask=known, other=0.0)[None, :]
    start = sample.to(tl.int64) * C * H * W
    x += start
    y += start
    k0, k1, k2, k3, k4, k5, k6, k7, k8 = _taps(weight, channel, known)
    shift = a * 0.0
    if BIAS:
        shift += tl.load(bias + channel, mask=known, other=0.0).to(tl.float32)[None, :]
    if GATED:
        shift = shift * tl.load(gates + sample * C + channel, mask=known, other=0.0)[None, :]
    above = tl.zeros((COLUMNS, CHANNELS), tl.float32)  # of the row above: all but its last part
    here = tl.zeros((COLUMNS, CHANNELS), tl.float32)
    left = _row(x, first - 1, column - 1, channel, known, 0, H, H, W, C, LAST)
    middle = _row(x, first - 1, column, channel, known, 0, H, H, W, C, LAST)
    right = _row(x, first - 1, column + 1, channel, known, 0, H, H, W, C, LAST)
    for row in range(first - 1, last + 1):
        next_left = _row(x, row + 1, column - 1, channel, known, 0, H, H, W, C, LAST)
        next_middle = _row(x, row + 1, column, channel, known, 0, H, H, W, C, LAST)
        next_right = _row(x, row + 1, column + 1, channel, known, 0, H, H, W, C, LAST)
        lz = _mapped(left, a, b, c, row, column - 1, 0, H, W)
        mz = _mapped(middle, a, b, c, row, column, 0, H, W)
        rz = _mapped(right, a, b, c, row, column + 1, 0, H, W)
        out = above + k6 * lz + k7 * mz + k8 * rz + shift
        _store(y, out, row - 1, column, channel, known, first, last, H, W, C, LAST)
        above = here + k3 * lz + k4 * mz + k5 * rz
        here = k0 * lz + k1 * mz + k2 * rz
        left, middle, right = next_left, next_middle, next_right


@triton.jit
def depthwise_sums_kernel(
    dy, x, map, weight, parts, taps, H, W, C, period, high, wide,
    LAST: tl.constexpr, COLUMNS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Σ g·(x − c) and Σ g into parts (2, splits, N, C); dk and Σ dy into taps (10, splits, N, C):
    one read of dy and x."""
    split, sample = tl.program_id(0), tl.program_id(2)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    known = channel < C
    column = split % wide * COLUMNS + tl.arange(0, COLUMNS)
    first = split // wide * high
    last = tl.minimum(first + high, H)
    entry = (sample * C + channel) % period
    a = tl.load(map + entry, mask=known, other=0.0)[None, :]
    b = tl.load(map + period + entry, mask=known, other=0.0)[None, :]
    c = tl.load(map + 2 * period + entry, mask=known, other=0.0)[None, :]
    start = sample.to(tl.int64) * C * H * W
    x += start
    dy += start
    k0, k1, k2, k3, k4, k5, k6, k7, k8 = _taps(weight, channel, known)
    zero = tl.zeros((COLUMNS, CHANNELS), tl.float32)
    above, here, da, db, total = zero, zero, zero, zero, zero
    d0, d1, d2, d3, d4, d5, d6, d7, d8 = zero, zero, zero, zero, zero, zero, zero, zero, zero
    left = _row(dy, first - 1, column - 1, channel, known, 0, H, H, W, C, LAST)
    middle = _row(dy, first - 1, column, channel, known, 0, H, H, W, C, LAST)
    right = _row(dy, first - 1, column + 1, channel, known, 0, H, H, W, C, LAST)
    x0 = _row(x, first - 2, column, channel, known, first, last, H, W, C, LAST)  # one row up
    x1 = _row(x, first - 1, column, channel, known, first, last, H, W, C, LAST)
    x2 = _row(x, first, column, channel, known, first, last, H, W, C, LAST)  # one row down
    for row in range(first - 1, last + 1):
        next_left = _row(dy, row + 1, column - 1, channel, known, 0, H, H, W, C, LAST)
        next_middle = _row(dy, row + 1, column, channel, known, 0, H, H, W, C, LAST)
        next_right = _row(dy, row + 1, column + 1, channel, known, 0, H, H, W, C, LAST)
        next_x = _row(x, row + 2, column, channel, known, first, last, H, W, C, LAST)
        lt, mt, rt = left.to(tl.float32), middle.to(tl.float32), right.to(tl.float32)
        # the kernel turned around: tap t sees dy at q − t
        inside = _there(row - 1, column, first, last, W)
        g = tl.where(inside[:, None], above + k2 * lt + k1 * mt + k0 * rt, 0.0)  # of the row above
        da += g * (x0.to(tl.float32) - c)
        db += g
        above = here + k5 * lt + k4 * mt + k3 * rt
        here = k8 * lt + k7 * mt + k6 * rt
        z = _mapped(x0, a, b, c, row - 1, column, first, last, W)
        d0 += z * rt
        d1 += z * mt
        d2 += z * lt
        z = _mapped(x1, a, b, c, row, column, first, last, W)
        d3 += z * rt
        d4 += z * mt
        d5 += z * lt
        z = _mapped(x2, a, b, c, row + 1, column, first, last, W)
        d6 += z * rt
        d7 += z * mt
        d8 += z * lt
        total += tl.where(_there(row, column, first, last, W)[:, None], mt, 0.0)
        left, middle, right = next_left, next_middle, next_right
        x0, x1, x2 = x1, x2, next_x
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
    dy, x, map, weight, extra, dx, H, W, C, period, high, wide,
    LAST: tl.constexpr, COLUMNS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """dx: one read of dy and x, one write."""
    sample = tl.program_id(2)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    known = channel < C
    column = tl.program_id(0) % wide * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.program_id(0) // wide * high
    last = tl.minimum(first + high, H)
    entry = (sample * C + channel) % period
    a = tl.load(map + entry, mask=known, other=0.0)[None, :]
    c = tl.load(map + 2 * period + entry, mask=known, other=0.0)[None, :]
    constant = tl.load(extra + entry, mask=known, other=0.0)[None, :]
    slope = tl.load(extra + period + entry, mask=known, other=0.0)[None, :]
    start = sample.to(tl.int64) * C * H * W
    x += start
    dy += start
    dx += start
    k0, k1, k2, k3, k4, k5, k6, k7, k8 = _taps(weight, channel, known)
    above = tl.zeros((COLUMNS, CHANNELS), tl.float32)
    here = tl.zeros((COLUMNS, CHANNELS), tl.float32)
    left = _row(dy, first - 1, column - 1, channel, known, 0, H, H, W, C, LAST)
    middle = _row(dy, first - 1, column, channel, known, 0, H, H, W, C, LAST)
    right = _row(dy, first - 1, column + 1, channel, known, 0, H, H, W, C, LAST)
    value = _row(x, first - 2, column, channel, known, first, last, H, W, C, LAST)
    for row in range(first - 1, last + 1):
        next_left = _row(dy, row + 1, column - 1, channel, known, 0, H, H, W, C, LAST)
        next_middle = _row(dy, row + 1, column, channel, known, 0, H, H, W, C, LAST)
        next_right = _row(dy, row + 1, column + 1, channel, known, 0, H, H, W, C, LAST)
        next_value = _row(x, row, column, channel, known, first, last, H, W, C, LAST)
        lt, mt, rt = left.to(tl.float32), middle.to(tl.float32), right.to(tl.float32)
        g = above + k2 * lt + k1 * mt + k0 * rt  # of the row above
        out = g * a + constant + (value.to(tl.float32) - c) * slope
        _store(dx, out, row - 1, column, channel, known, first, last, H, W, C, LAST)
        above = here + k5 * lt + k4 * mt + k3 * rt
        here = k8 * lt + k7 * mt + k6 * rt
        left, middle, right, value = next_left, next_middle, next_right, next_value
