"""Standardizations: the arithmetic between two passes in one kernel.

Parts are tables (splits, N, C), or (splits, 1, C) where a cell is a channel of the whole batch.
A pool is what shares a mean and a variance: a group of D channels, of all samples or of each. Pools
of all samples take all rows of the parts; the pools of sample n take the rows n, n + N, n + 2N, ….
With A = Σ γ·Σg(x − mean), B = Σ γ·Σg over a pool of ``values`` numbers:

    dx = a·g + constant + slope·x
    slope = −A/(values·std³),   constant = −B/(values·std) − mean·slope

One tensor holds what is made: the map (2, R, C), then mean and second (2, R, groups), R = N or 1.
"""

from __future__ import annotations

import triton
import triton.language as tl

from normkit.engine import triton_stages as stages


@triton.jit
def pool_map_kernel(
    parts, weight, bias, made, running_mean, running_second, batches, nonfinite,
    arrivals, toward_mean, toward_std, counter, old_mean, old_std,
    rows, C, groups, positions, splits, span, members, eps, momentum, correction,
    r_max, r_start, r_end, d_max, d_start, d_end, earlier,
    AFFINE: tl.constexpr, REMEMBER: tl.constexpr, RENORM: tl.constexpr,
    D: tl.constexpr, DEPTH: tl.constexpr, GROUPS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """``members`` rows of the parts go into each pool. With RENORM the second statistic is
    √(var + eps), and r and d follow it."""
    sample, samples = tl.program_id(1), tl.num_programs(1)
    channel, inside = stages.own_channels(groups, D, GROUPS, WIDE)
    squares = parts + splits * rows * C
    values = rows // samples * 1.0 * positions * D
    total = tl.zeros((DEPTH, GROUPS * WIDE), tl.float32)
    for start in range(0, members, DEPTH):
        member = start + tl.arange(0, DEPTH)
        row = member * samples + sample
        mask = (member < members)[:, None] & inside[None, :]
        count = tl.minimum(positions - row // rows * span, span).to(tl.float32)[:, None]
        at = row.to(tl.int64)[:, None] * C + channel[None, :]
        total += count * tl.load(parts + at, mask=mask, other=0.0)
    mean = stages.group_total(tl.sum(total, 0), GROUPS, WIDE) / values
    total = tl.zeros((DEPTH, GROUPS * WIDE), tl.float32)
    for start in range(0, members, DEPTH):
        member = start + tl.arange(0, DEPTH)
        row = member * samples + sample
        mask = (member < members)[:, None] & inside[None, :]
        count = tl.minimum(positions - row // rows * span, span).to(tl.float32)[:, None]
        at = row.to(tl.int64)[:, None] * C + channel[None, :]
        apart = tl.load(parts + at, mask=mask, other=0.0) - mean[None, :]
        square = tl.load(squares + at, mask=mask, other=0.0)
        total += tl.where(mask, square + count * apart * apart, 0.0)
    var = stages.group_total(tl.sum(total, 0), GROUPS, WIDE) / values
    a = 1.0 / tl.sqrt(var + eps)
    b = -mean * a
    second = var
    table = samples.to(tl.int64) * C
    statistics = made + 2 * table
    if RENORM:
        second = (var + eps) * a
        before = tl.load(toward_mean + channel, mask=inside, other=0.0)
        spread = tl.load(toward_std + channel, mask=inside, other=1.0)
        seen = tl.load(counter).to(tl.float32) + earlier
        most = 1.0 + (r_max - 1.0) * _progress(seen, r_start, r_end)
        r = tl.minimum(tl.maximum(second / spread, 1.0 / most), most)
        most = d_max * _progress(seen, d_start, d_end)
        d = tl.minimum(tl.maximum((mean - before) / spread, -most), most)
        a, b = a * r, b * r + d
        tl.store(statistics + 2 * C + channel, r, mask=inside)
        tl.store(statistics + 3 * C + channel, d, mask=inside)
        tl.store(old_mean + channel, before, mask=inside)
        tl.store(old_std + channel, spread, mask=inside)
    if AFFINE:
        gamma = tl.load(weight + channel, mask=inside, other=0.0).to(tl.float32)
        a = a * gamma
        b = b * gamma + tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    entry = sample.to(tl.int64) * C + channel
    tl.store(made + entry, a, mask=inside)
    tl.store(made + table + entry, b, mask=inside)
    first = inside & (channel % D == 0)
    pool = sample * groups + channel // D
    tl.store(statistics + pool, mean, mask=first)
    tl.store(statistics + samples * groups + pool, second, mask=first)
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
def pool_gradient_kernel(
    parts, weight, made, out, rows, C, groups, positions, splits, members, eps,
    AFFINE: tl.constexpr, RENORM: tl.constexpr,
    D: tl.constexpr, DEPTH: tl.constexpr, GROUPS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """From the parts of Σ g·x and Σ g, (4, R, C): constant and slope of dx, gradients of γ and β,
    which of several samples are left to be summed."""
    sample, samples = tl.program_id(1), tl.num_programs(1)
    channel, inside = stages.own_channels(groups, D, GROUPS, WIDE)
    values = rows // samples * 1.0 * positions * D
    shifts = parts + splits * rows * C
    by_scale = tl.zeros((DEPTH, GROUPS * WIDE), tl.float32)
    by_shift = tl.zeros((DEPTH, GROUPS * WIDE), tl.float32)
    for start in range(0, members, DEPTH):
        member = start + tl.arange(0, DEPTH)
        mask = (member < members)[:, None] & inside[None, :]
        at = (member * samples + sample).to(tl.int64)[:, None] * C + channel[None, :]
        by_scale += tl.load(parts + at, mask=mask, other=0.0)
        by_shift += tl.load(shifts + at, mask=mask, other=0.0)
    da, db = tl.sum(by_scale, 0), tl.sum(by_shift, 0)
    table = samples.to(tl.int64) * C
    statistics = made + 2 * table
    pool = sample * groups + channel // D
    mean = tl.load(statistics + pool, mask=inside, other=0.0)
    second = tl.load(statistics + samples * groups + pool, mask=inside, other=1.0)
    inverse = 1.0 / second if RENORM else 1.0 / tl.sqrt(second + eps)
    about = da - mean * db  # Σ g·(x − mean)
    dweight = about * inverse
    factor = 1.0
    if RENORM:
        factor = tl.load(statistics + 2 * C + channel, mask=inside, other=0.0)
        shift = tl.load(statistics + 3 * C + channel, mask=inside, other=0.0)
        dweight = dweight * factor + db * shift
    entry = sample.to(tl.int64) * C + channel
    tl.store(out + 2 * table + entry, dweight, mask=inside)
    tl.store(out + 3 * table + entry, db, mask=inside)
    if AFFINE:
        factor = factor * tl.load(weight + channel, mask=inside, other=0.0).to(tl.float32)
    about = stages.group_total(about * factor, GROUPS, WIDE)
    db = stages.group_total(db * factor, GROUPS, WIDE)
    slope = -about * inverse * inverse * inverse / values
    tl.store(out + entry, -db * inverse / values - mean * slope, mask=inside)
    tl.store(out + table + entry, slope, mask=inside)
