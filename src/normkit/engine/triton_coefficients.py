"""The arithmetic between two passes in one kernel: from the parts of the moments to the map, and
from the parts of the sums to the gradients.

Parts are tables (splits, N, C), or (splits, 1, C) where a cell is a channel of the whole batch.
A pool is what shares a mean and a variance: a channel over all samples ("batch"), or a group of
D channels of one sample ("sample"). With A = Σ γ·Σg(x − mean), B = Σ γ·Σg over a pool of n values:

    dx = a·g + constant + slope·x,   slope = −A/(n·std³),   constant = −B/(n·std) − mean·slope
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def batch_map_kernel(
    parts, weight, bias, found, rows, C, positions, splits, span, values, eps,
    AFFINE: tl.constexpr, DEPTH: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Pool each channel over splits and samples. Out (4, C): scale, shift, mean, variance."""
    channel = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    squares = parts + splits * rows * C
    inside = channel < C
    total = tl.zeros((DEPTH, WIDTH), tl.float32)
    for start in range(0, splits * rows, DEPTH):
        row = start + tl.arange(0, DEPTH)
        mask = (row < splits * rows)[:, None] & inside[None, :]
        count = tl.minimum(positions - row // rows * span, span).to(tl.float32)[:, None]
        at = row.to(tl.int64)[:, None] * C + channel[None, :]
        total += count * tl.load(parts + at, mask=mask, other=0.0)
    mean = tl.sum(total, 0) / values
    total = tl.zeros((DEPTH, WIDTH), tl.float32)
    for start in range(0, splits * rows, DEPTH):
        row = start + tl.arange(0, DEPTH)
        mask = (row < splits * rows)[:, None] & inside[None, :]
        count = tl.minimum(positions - row // rows * span, span).to(tl.float32)[:, None]
        at = row.to(tl.int64)[:, None] * C + channel[None, :]
        apart = tl.load(parts + at, mask=mask, other=0.0) - mean[None, :]
        square = tl.load(squares + at, mask=mask, other=0.0)
        total += tl.where(mask, square + count * apart * apart, 0.0)
    var = tl.sum(total, 0) / values
    a = 1.0 / tl.sqrt(var + eps)
    b = -mean * a
    if AFFINE:
        gamma = tl.load(weight + channel, mask=inside, other=0.0).to(tl.float32)
        a = a * gamma
        b = b * gamma + tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    tl.store(found + channel, a, mask=inside)
    tl.store(found + C + channel, b, mask=inside)
    tl.store(found + 2 * C + channel, mean, mask=inside)
    tl.store(found + 3 * C + channel, var, mask=inside)


@triton.jit
def batch_gradient_kernel(
    parts, weight, statistics, out, rows, C, splits, values, eps,
    AFFINE: tl.constexpr, DEPTH: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """From the parts of Σ g·x and Σ g, (4, C): constant and slope of dx, gradients of γ and β."""
    channel = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    shifts = parts + splits * rows * C
    inside = channel < C
    by_scale = tl.zeros((DEPTH, WIDTH), tl.float32)
    by_shift = tl.zeros((DEPTH, WIDTH), tl.float32)
    for start in range(0, splits * rows, DEPTH):
        row = start + tl.arange(0, DEPTH)
        mask = (row < splits * rows)[:, None] & inside[None, :]
        at = row.to(tl.int64)[:, None] * C + channel[None, :]
        by_scale += tl.load(parts + at, mask=mask, other=0.0)
        by_shift += tl.load(shifts + at, mask=mask, other=0.0)
    da, db = tl.sum(by_scale, 0), tl.sum(by_shift, 0)
    mean = tl.load(statistics + channel, mask=inside, other=0.0)
    inverse = 1.0 / tl.sqrt(tl.load(statistics + C + channel, mask=inside, other=1.0) + eps)
    about = da - mean * db  # Σ g·(x − mean)
    tl.store(out + 2 * C + channel, about * inverse, mask=inside)
    tl.store(out + 3 * C + channel, db, mask=inside)
    if AFFINE:
        gamma = tl.load(weight + channel, mask=inside, other=0.0).to(tl.float32)
        about, db = about * gamma, db * gamma
    slope = -about * inverse * inverse * inverse / values
    tl.store(out + channel, -db * inverse / values - mean * slope, mask=inside)
    tl.store(out + C + channel, slope, mask=inside)


@triton.jit
def sample_map_kernel(
    parts, weight, bias, map, statistics, C, groups, positions, splits, span, eps,
    D: tl.constexpr, AFFINE: tl.constexpr, GROUPS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Pool each group of D channels of a sample: the map (2, N, C), mean and variance
    (2, N, groups)."""
    sample, rows = tl.program_id(1), tl.num_programs(1)
    table = rows.to(tl.int64) * C
    squares = parts + splits * table
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    member = tl.arange(0, WIDE)
    channel = group[:, None] * D + member[None, :]
    inside = (group < groups)[:, None] & (member < D)[None, :]
    values = positions * 1.0 * D
    total = tl.zeros((GROUPS, WIDE), tl.float32)
    for split in range(splits):
        count = tl.minimum(positions - split * span, span).to(tl.float32)
        at = (split * rows + sample).to(tl.int64) * C + channel
        total += count * tl.load(parts + at, mask=inside, other=0.0)
    mean = tl.sum(total, 1) / values
    total = tl.zeros((GROUPS, WIDE), tl.float32)
    for split in range(splits):
        count = tl.minimum(positions - split * span, span).to(tl.float32)
        at = (split * rows + sample).to(tl.int64) * C + channel
        apart = tl.load(parts + at, mask=inside, other=0.0) - mean[:, None]
        square = tl.load(squares + at, mask=inside, other=0.0)
        total += tl.where(inside, square + count * apart * apart, 0.0)
    var = tl.sum(total, 1) / values
    a = tl.zeros((GROUPS, WIDE), tl.float32) + (1.0 / tl.sqrt(var + eps))[:, None]
    b = -mean[:, None] * a
    if AFFINE:
        gamma = tl.load(weight + channel, mask=inside, other=0.0).to(tl.float32)
        a = a * gamma
        b = b * gamma + tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    entry = sample.to(tl.int64) * C + channel
    tl.store(map + entry, a, mask=inside)
    tl.store(map + table + entry, b, mask=inside)
    pool = sample * groups + group
    tl.store(statistics + pool, mean, mask=group < groups)
    tl.store(statistics + rows * groups + pool, var, mask=group < groups)


@triton.jit
def sample_gradient_kernel(
    parts, weight, statistics, out, C, groups, positions, splits, eps,
    D: tl.constexpr, AFFINE: tl.constexpr, GROUPS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """As for a batch, (4, N, C): the gradients of γ and β are left per sample, to be summed."""
    sample, rows = tl.program_id(1), tl.num_programs(1)
    table = rows.to(tl.int64) * C
    shifts = parts + splits * table
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    member = tl.arange(0, WIDE)
    channel = group[:, None] * D + member[None, :]
    inside = (group < groups)[:, None] & (member < D)[None, :]
    values = positions * 1.0 * D
    da = tl.zeros((GROUPS, WIDE), tl.float32)
    db = tl.zeros((GROUPS, WIDE), tl.float32)
    for split in range(splits):
        at = (split * rows + sample).to(tl.int64) * C + channel
        da += tl.load(parts + at, mask=inside, other=0.0)
        db += tl.load(shifts + at, mask=inside, other=0.0)
    pool = sample * groups + group
    mean = tl.load(statistics + pool, mask=group < groups, other=0.0)
    var = tl.load(statistics + rows * groups + pool, mask=group < groups, other=1.0)
    inverse = 1.0 / tl.sqrt(var + eps)
    about = da - mean[:, None] * db
    entry = sample.to(tl.int64) * C + channel
    tl.store(out + 2 * table + entry, about * inverse[:, None], mask=inside)
    tl.store(out + 3 * table + entry, db, mask=inside)
    if AFFINE:
        gamma = tl.load(weight + channel, mask=inside, other=0.0).to(tl.float32)
        about, db = about * gamma, db * gamma
    slope = -tl.sum(about, 1) * inverse * inverse * inverse / values
    constant = -tl.sum(db, 1) * inverse / values - mean * slope
    spread = tl.zeros((GROUPS, WIDE), tl.float32)
    tl.store(out + entry, spread + constant[:, None], mask=inside)
    tl.store(out + table + entry, spread + slope[:, None], mask=inside)


@triton.jit
def remember_kernel(
    statistics, running_mean, running_var, batches, nonfinite, size, weight, correction,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """running ← (1 − weight)·running + weight·new for all channels, or for none if a statistic
    is not finite; counts which. One program: it must see all channels before it writes."""
    mean, var = statistics, statistics + size
    bad = tl.zeros((WIDTH,), tl.int32)
    for start in range(0, size, WIDTH):
        entry = start + tl.arange(0, WIDTH)
        both = tl.load(mean + entry, mask=entry < size, other=0.0)
        both += tl.load(var + entry, mask=entry < size, other=0.0)
        bad += ((both - both) != 0.0).to(tl.int32)  # inf − inf and NaN are not 0
    good = tl.sum(bad, 0) == 0
    tl.store(batches, tl.load(batches) + good.to(tl.int64))
    tl.store(nonfinite, tl.load(nonfinite) + (1 - good.to(tl.int64)))
    for start in range(0, size, WIDTH):
        entry = start + tl.arange(0, WIDTH)
        mask = entry < size
        old = tl.load(running_mean + entry, mask=mask, other=0.0)
        new = tl.load(mean + entry, mask=mask, other=0.0)
        tl.store(running_mean + entry, tl.where(good, old + weight * (new - old), old), mask=mask)
        old = tl.load(running_var + entry, mask=mask, other=0.0)
        new = tl.load(var + entry, mask=mask, other=0.0) * correction
        tl.store(running_var + entry, tl.where(good, old + weight * (new - old), old), mask=mask)
