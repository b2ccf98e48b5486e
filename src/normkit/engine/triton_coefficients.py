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

from normkit.engine import triton_stages as stages


@triton.jit
def batch_map_kernel(
    parts, weight, bias, map, statistics, running_mean, running_second, batches, nonfinite,
    arrivals, toward_mean, toward_std, counter, old_mean, old_std,
    rows, C, groups, positions, splits, span, eps, momentum, correction,
    r_max, r_start, r_end, d_max, d_start, d_end, earlier,
    AFFINE: tl.constexpr, REMEMBER: tl.constexpr, RENORM: tl.constexpr,
    D: tl.constexpr, DEPTH: tl.constexpr, GROUPS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Pool each group of D channels over splits and samples: the map (2, C), mean and variance
    (2, groups). With RENORM the second is √(var + eps), and r and d follow."""
    channel, inside = stages.own_channels(groups, D, GROUPS, WIDE)
    squares = parts + splits * rows * C
    values = rows * 1.0 * positions * D
    total = tl.zeros((DEPTH, GROUPS * WIDE), tl.float32)
    for start in range(0, splits * rows, DEPTH):
        row = start + tl.arange(0, DEPTH)
        mask = (row < splits * rows)[:, None] & inside[None, :]
        count = tl.minimum(positions - row // rows * span, span).to(tl.float32)[:, None]
        at = row.to(tl.int64)[:, None] * C + channel[None, :]
        total += count * tl.load(parts + at, mask=mask, other=0.0)
    mean = stages.group_sum(tl.sum(total, 0)[None, :], GROUPS, WIDE) / values
    total = tl.zeros((DEPTH, GROUPS * WIDE), tl.float32)
    for start in range(0, splits * rows, DEPTH):
        row = start + tl.arange(0, DEPTH)
        mask = (row < splits * rows)[:, None] & inside[None, :]
        count = tl.minimum(positions - row // rows * span, span).to(tl.float32)[:, None]
        at = row.to(tl.int64)[:, None] * C + channel[None, :]
        apart = tl.load(parts + at, mask=mask, other=0.0) - mean
        square = tl.load(squares + at, mask=mask, other=0.0)
        total += tl.where(mask, square + count * apart * apart, 0.0)
    var = stages.group_sum(tl.sum(total, 0)[None, :], GROUPS, WIDE) / values
    own = channel[None, :]
    known = inside[None, :]
    first = known & (own % D == 0)
    a = 1.0 / tl.sqrt(var + eps)
    b = -mean * a
    if RENORM:
        var = tl.sqrt(var + eps)
        before = tl.load(toward_mean + own, mask=known, other=0.0)
        spread = tl.load(toward_std + own, mask=known, other=1.0)
        tl.store(old_mean + own, before, mask=known)
        tl.store(old_std + own, spread, mask=known)
        seen = tl.load(counter).to(tl.float32) + earlier
        most = 1.0 + (r_max - 1.0) * _progress(seen, r_start, r_end)
        r = tl.minimum(tl.maximum(var / spread, 1.0 / most), most)
        most = d_max * _progress(seen, d_start, d_end)
        d = tl.minimum(tl.maximum((mean - before) / spread, -most), most)
        a, b = a * r, b * r + d
        tl.store(statistics + 2 * C + own, r, mask=known)
        tl.store(statistics + 3 * C + own, d, mask=known)
    tl.store(statistics + own // D, mean, mask=first)
    tl.store(statistics + groups + own // D, var, mask=first)
    if AFFINE:
        gamma = tl.load(weight + own, mask=known, other=0.0).to(tl.float32)
        a = a * gamma
        b = b * gamma + tl.load(bias + own, mask=known, other=0.0).to(tl.float32)
    tl.store(map + own, a, mask=known)
    tl.store(map + C + own, b, mask=known)
    if REMEMBER:
        stages.remember(
            arrivals, statistics, running_mean, running_second, batches, nonfinite, statistics,
            groups, momentum, correction, False, 256,
        )  # fmt: skip


@triton.jit
def _progress(seen, start, end):
    """How far a ramp has come, 0 to 1."""
    return tl.minimum(tl.maximum((seen - start) / (end - start), 0.0), 1.0)


@triton.jit
def batch_gradient_kernel(
    parts, weight, statistics, out, rows, C, groups, positions, splits, eps,
    AFFINE: tl.constexpr, RENORM: tl.constexpr,
    D: tl.constexpr, DEPTH: tl.constexpr, GROUPS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """From the parts of Σ g·x and Σ g, (4, C): constant and slope of dx, gradients of γ and β."""
    channel, inside = stages.own_channels(groups, D, GROUPS, WIDE)
    values = rows * 1.0 * positions * D
    shifts = parts + splits * rows * C
    by_scale = tl.zeros((DEPTH, GROUPS * WIDE), tl.float32)
    by_shift = tl.zeros((DEPTH, GROUPS * WIDE), tl.float32)
    for start in range(0, splits * rows, DEPTH):
        row = start + tl.arange(0, DEPTH)
        mask = (row < splits * rows)[:, None] & inside[None, :]
        at = row.to(tl.int64)[:, None] * C + channel[None, :]
        by_scale += tl.load(parts + at, mask=mask, other=0.0)
        by_shift += tl.load(shifts + at, mask=mask, other=0.0)
    da, db = tl.sum(by_scale, 0)[None, :], tl.sum(by_shift, 0)[None, :]
    own = channel[None, :]
    known = inside[None, :]
    mean = tl.load(statistics + own // D, mask=known, other=0.0)
    second = tl.load(statistics + groups + own // D, mask=known, other=1.0)
    inverse = 1.0 / second if RENORM else 1.0 / tl.sqrt(second + eps)
    about = da - mean * db  # Σ g·(x − mean)
    dweight = about * inverse
    factor = 1.0
    if RENORM:
        factor = tl.load(statistics + 2 * C + own, mask=known, other=0.0)
        dweight = dweight * factor + db * tl.load(statistics + 3 * C + own, mask=known, other=0.0)
    tl.store(out + 2 * C + own, dweight, mask=known)
    tl.store(out + 3 * C + own, db, mask=known)
    if AFFINE:
        factor = factor * tl.load(weight + own, mask=known, other=0.0).to(tl.float32)
    about = stages.group_sum(about * factor, GROUPS, WIDE)
    db = stages.group_sum(db * factor, GROUPS, WIDE)
    slope = -about * inverse * inverse * inverse / values
    tl.store(out + own, -db * inverse / values - mean * slope, mask=known)
    tl.store(out + C + own, slope, mask=known)


@triton.jit
def sample_map_kernel(
    parts, weight, bias, map, statistics, C, groups, positions, splits, span, eps,
    AFFINE: tl.constexpr, D: tl.constexpr, GROUPS: tl.constexpr, WIDE: tl.constexpr,
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
    AFFINE: tl.constexpr, D: tl.constexpr, GROUPS: tl.constexpr, WIDE: tl.constexpr,
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
