"""Standardizations: bn, bgn, batch_renorm, gn, ln, in.

Parts are tables (splits, N, C), or (splits, 1, C) where a cell is a channel of the whole batch.
A pool is what shares a mean and a variance: a group of D channels, of all samples or of each. Pools
of all samples take all rows of the parts; the pools of sample n take the rows n, n + N, n + 2N, ….
With A = Σ γ·Σg(x − mean), B = Σ γ·Σg over a pool of ``values`` numbers:

    dx = a·g + constant + slope·(x − mean)
    slope = −A/(values·std³),   constant = −B/(values·std)

One tensor holds what is made: the map (3, R, C), then mean and second (2, R, groups), R = N or 1.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from normkit.core.fusion import Pool
from normkit.core.statistics import Seen
from normkit.engine.families.family import ChannelLayout, FamilyTables
from normkit.engine.triton import passes, stages
from normkit.engine.triton.launch import Launch

TILE = 4096  # entries of the parts that a program holds: 32 registers of each thread
NO_RAMPS = (1.0, 0.0, 1.0, 0.0, 0.0, 1.0)


def coefficients(
    x: Tensor, parts: passes.Parts, fusion: Pool, layout: ChannelLayout
) -> FamilyTables:
    channels, groups, memory, ramps = x.shape[1], fusion.groups, fusion.memory, fusion.ramps
    samples = layout.rows if fusion.kind == "sample" else 1
    period = samples * channels
    kept = 0 if ramps is None else 2 * channels
    tables = passes.table(x, 3 * period + 2 * samples * groups + kept)
    start = _map(
        samples,
        (layout.rows, channels, groups, layout.count, parts.splits, parts.span),
        fusion.eps,
        (0.0, 1.0) if memory is None else memory[5:],
        NO_RAMPS if ramps is None else ramps[:6],
        (fusion.weight is not None, stages.at_once(memory, groups), ramps is not None),
    )
    start(
        parts.tables,
        fusion.weight,
        fusion.bias,
        tables,
        *((None,) * 5 if memory is None else memory[:5]),
        *((None,) * 3 if ramps is None else ramps[6:]),
    )
    return FamilyTables(tables, period, 3 * period, None)


@lru_cache(maxsize=4096)
def _map(samples: int, sizes: Any, eps: float, memory: Any, ramps: Any, flags: Any) -> Launch:
    rows, channels, groups, _, splits, _ = sizes
    members = splits * rows // samples
    blocks, tile = _tile(members, channels, groups, samples)
    numbers = *sizes, members, eps, *memory, *ramps
    whole = tile[1] >= members
    constants = *flags, whole, *tile
    return Launch(pool_map_kernel, (blocks, samples), numbers, constants, _warps(tile))


def gradients(
    x: Tensor,
    parts: passes.Parts,
    fusion: Pool,
    layout: ChannelLayout,
    tables: Tensor,
    grad_gates: Tensor | None,
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    channels = x.shape[1]
    samples = layout.rows if fusion.kind == "sample" else 1
    period = samples * channels
    out = passes.table(x, 4 * period)
    start = _gradient(
        samples,
        (layout.rows, channels, fusion.groups, layout.count, parts.splits),
        fusion.eps,
        (fusion.weight is not None, fusion.ramps is not None),
    )
    start(parts.tables, fusion.weight, tables, out)
    if fusion.weight is None:
        return out, (None, None)
    if samples == 1:
        return out, (out[2 * channels : 3 * channels], out[3 * channels :])
    summed = passes.summed_rows(out, 2 * period, 2, samples)
    return out, (summed[:channels], summed[channels:])


@lru_cache(maxsize=4096)
def _gradient(samples: int, sizes: Any, eps: float, flags: Any) -> Launch:
    rows, channels, groups, _, splits = sizes
    members = splits * rows // samples
    blocks, tile = _tile(members, channels, groups, samples)
    numbers = *sizes, members, eps
    constants = *flags, *tile
    return Launch(pool_gradient_kernel, (blocks, samples), numbers, constants, _warps(tile))


def _tile(members: int, channels: int, groups: int, samples: int) -> tuple[int, tuple[int, ...]]:
    """How many programs for all groups, and D, DEPTH, GROUPS, WIDE.

    A pool of the whole batch is deep: 4 or 8 columns each, so that many programs share the work,
    and if possible all of it at once. Those of samples are shallow, and there are as many programs
    as samples anyway.
    """
    deep = channels // groups
    wide = passes.power_of_two(deep)
    members = passes.power_of_two(members)
    columns = (8 if members <= 512 else 4) if samples == 1 else max(8, 1024 // members)
    many = max(1, min(columns // wide, passes.power_of_two(groups)))
    depth = max(1, min(TILE // (many * wide), members))
    return -(-groups // many), (deep, depth, many, wide)


def _warps(tile: tuple[int, ...]) -> int:
    """Enough that a thread waits for few loads."""
    _, depth, many, wide = tile
    return stages.warps_for(depth * many * wide)


def seen(fusion: Pool, tables: Tensor, rows: int, channels: int) -> Seen:
    if fusion.ramps is None:
        return Seen()
    r, d = tables[-2 * channels :].view(2, 1, channels)
    return Seen(observed={"correction": (r, d)})


# ---------------------------------------------------------------- kernels


@triton.jit
def pool_map_kernel(
    parts, weight, bias, made, running_mean, running_second, batches, nonfinite,
    arrivals, toward_mean, toward_std, counter,
    rows, C, groups, positions, splits, span, members, eps, momentum, correction,
    r_max, r_start, r_end, d_max, d_start, d_end,
    AFFINE: tl.constexpr, REMEMBER: tl.constexpr, RENORM: tl.constexpr, WHOLE: tl.constexpr,
    D: tl.constexpr, DEPTH: tl.constexpr, GROUPS: tl.constexpr, WIDE: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """``members`` rows of the parts go into each pool. With RENORM the second statistic is
    √(var + eps), and r and d follow it."""
    sample, samples = tl.program_id(1), tl.num_programs(1)
    channel, inside = stages.own_channels(groups, D, GROUPS, WIDE)
    squares = parts + splits * rows * C
    values = rows // samples * 1.0 * positions * D
    # sums of differences from one of the means round less than those of means
    stages.release(OVERLAP)
    stages.wait(OVERLAP)
    near = tl.load(parts + sample.to(tl.int64) * C + channel // D * D, mask=inside, other=0.0)
    member = tl.arange(0, DEPTH)
    if WHOLE:  # all parts stay in registers: what this kernel takes is time to wait for memory
        row = member * samples + sample
        mask = (member < members)[:, None] & inside[None, :]
        count = tl.minimum(positions - row // rows * span, span).to(tl.float32)[:, None]
        at = row.to(tl.int64)[:, None] * C + channel[None, :]
        means = tl.load(parts + at, mask=mask, other=0.0)
        inner = tl.load(squares + at, mask=mask, other=0.0)
        total = tl.where(mask, count * (means - near[None, :]), 0.0)
        mean = near + stages.group_total(tl.sum(total, 0), GROUPS, WIDE) / values
        apart = means - mean[None, :]
        total = tl.where(mask, inner + count * apart * apart, 0.0)
    else:
        total = tl.zeros((DEPTH, GROUPS * WIDE), tl.float32)
        for start in range(0, members, DEPTH):
            row = (start + member) * samples + sample
            mask = (start + member < members)[:, None] & inside[None, :]
            count = tl.minimum(positions - row // rows * span, span).to(tl.float32)[:, None]
            at = row.to(tl.int64)[:, None] * C + channel[None, :]
            apart = tl.load(parts + at, mask=mask, other=0.0) - near[None, :]
            total += tl.where(mask, count * apart, 0.0)
        mean = near + stages.group_total(tl.sum(total, 0), GROUPS, WIDE) / values
        total = tl.zeros((DEPTH, GROUPS * WIDE), tl.float32)
        for start in range(0, members, DEPTH):
            row = (start + member) * samples + sample
            mask = (start + member < members)[:, None] & inside[None, :]
            count = tl.minimum(positions - row // rows * span, span).to(tl.float32)[:, None]
            at = row.to(tl.int64)[:, None] * C + channel[None, :]
            apart = tl.load(parts + at, mask=mask, other=0.0) - mean[None, :]
            square = tl.load(squares + at, mask=mask, other=0.0)
            total += tl.where(mask, square + count * apart * apart, 0.0)
    var = stages.group_total(tl.sum(total, 0), GROUPS, WIDE) / values
    a = 1.0 / tl.sqrt(var + eps)
    b = mean * 0.0
    second = var
    table = samples.to(tl.int64) * C
    statistics = made + 3 * table
    if RENORM:
        second = (var + eps) * a
        before = tl.load(toward_mean + channel, mask=inside, other=0.0)
        spread = tl.load(toward_std + channel, mask=inside, other=1.0)
        seen = tl.load(counter).to(tl.float32)
        most = 1.0 + (r_max - 1.0) * _progress(seen, r_start, r_end)
        r = tl.minimum(tl.maximum(second / spread, 1.0 / most), most)
        most = d_max * _progress(seen, d_start, d_end)
        d = tl.minimum(tl.maximum((mean - before) / spread, -most), most)
        a, b = a * r, d
        tl.store(statistics + 2 * C + channel, r, mask=inside)
        tl.store(statistics + 3 * C + channel, d, mask=inside)
    if AFFINE:
        gamma = tl.load(weight + channel, mask=inside, other=0.0).to(tl.float32)
        a = a * gamma
        b = b * gamma + tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    entry = sample.to(tl.int64) * C + channel
    tl.store(made + entry, a, mask=inside)
    tl.store(made + table + entry, b, mask=inside)
    tl.store(made + 2 * table + entry, mean, mask=inside)
    first = inside & (channel % D == 0)
    pool = sample * groups + channel // D
    tl.store(statistics + pool, mean, mask=first)
    tl.store(statistics + samples * groups + pool, second, mask=first)
    if REMEMBER:
        stages.remember(
            arrivals, statistics, running_mean, running_second, batches, nonfinite, statistics,
            groups, momentum, correction, False, REMEMBER,
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
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """From the parts of Σ g·(x − mean) and Σ g, (4, R, C): constant and slope of dx, gradients of γ
    and β, which of several samples are left to be summed."""
    sample, samples = tl.program_id(1), tl.num_programs(1)
    channel, inside = stages.own_channels(groups, D, GROUPS, WIDE)
    values = rows // samples * 1.0 * positions * D
    shifts = parts + splits * rows * C
    by_scale = tl.zeros((DEPTH, GROUPS * WIDE), tl.float32)
    by_shift = tl.zeros((DEPTH, GROUPS * WIDE), tl.float32)
    stages.release(OVERLAP)
    stages.wait(OVERLAP)
    for start in range(0, members, DEPTH):
        member = start + tl.arange(0, DEPTH)
        mask = (member < members)[:, None] & inside[None, :]
        at = (member * samples + sample).to(tl.int64)[:, None] * C + channel[None, :]
        by_scale += tl.load(parts + at, mask=mask, other=0.0)
        by_shift += tl.load(shifts + at, mask=mask, other=0.0)
    about, db = tl.sum(by_scale, 0), tl.sum(by_shift, 0)
    table = samples.to(tl.int64) * C
    statistics = made + 3 * table
    pool = sample * groups + channel // D
    second = tl.load(statistics + samples * groups + pool, mask=inside, other=1.0)
    inverse = 1.0 / second if RENORM else 1.0 / tl.sqrt(second + eps)
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
    tl.store(out + entry, -db * inverse / values, mask=inside)
    tl.store(out + table + entry, slope, mask=inside)
