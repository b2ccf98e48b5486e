"""Batch-channel normalization: a batch norm, then a group norm of its output.

With a₁ = γ·ŝ of the batch norm, the group norm sees means m₁ = a₁(m − μ) + β and variances a₁²v.
With M and V their pool over a group, r = 1/√(V + ε), and the group's own g and h:

    a = a₁·A,   b = (β − M)·A + h,   c = μ        where A = r·g
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from normkit.core.fusion import Channel
from normkit.core.statistics import Seen
from normkit.engine.families.family import ChannelLayout, FamilyTables
from normkit.engine.families.gate import COLUMNS
from normkit.engine.triton import passes, stages
from normkit.engine.triton.launch import Launch


def coefficients(
    x: Tensor, parts: passes.Parts, fusion: Channel, layout: ChannelLayout
) -> FamilyTables:
    channels, rows = x.shape[1], layout.rows
    if stages.rows_at_once(rows, parts.splits, _columns(channels, fusion.groups)) is None:
        parts = passes.merged(x, parts, layout, sums=True)
    tables = passes.table(x, 5 * rows * channels + 4 * channels)
    memory, given = fusion.memory, fusion.given
    if given is None and memory is not None:
        given = memory.mean, memory.second
    micro = memory is not None and fusion.rate is not None
    # with micro batches every channel must be in the statistics before the map
    turns = ((True, False), (False, True)) if micro else ((memory is not None, True),)
    width = stages.at_once(memory, channels)
    for remember, map in turns:
        source, affine, own = _flags(fusion)
        start = _map(
            (rows, channels, fusion.groups, layout.count, parts.splits, parts.span),
            fusion.eps,
            (0.0, 1.0) if memory is None else memory[5:],
            (source, micro, affine, own, width if remember else 0, map),
        )
        start(
            parts.tables,
            tables,
            *fusion.parameters,
            *((None, None) if given is None else given),
            *((None,) * 3 if memory is None else memory[2:5]),
            fusion.rate,
        )
    return FamilyTables(tables, rows * channels, 5 * rows * channels, None)


@lru_cache(maxsize=4096)
def _map(sizes: Any, eps: float, memory: Any, flags: Any) -> Launch:
    rows, channels, groups, _, splits = sizes[:5]
    grid, tile, warps = _tile(rows, channels, groups, splits)
    numbers = *sizes, eps, *memory
    return Launch(channel_map_kernel, grid, numbers, (*flags, *tile), warps)


def gradients(
    x: Tensor,
    parts: passes.Parts,
    fusion: Channel,
    layout: ChannelLayout,
    tables: Tensor,
    grad_gates: Tensor | None,
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    channels, rows = x.shape[1], layout.rows
    if stages.rows_at_once(rows, parts.splits, _columns(channels, fusion.groups)) is None:
        parts = passes.summed(parts)
    out = passes.table(x, 2 * rows * channels + 4 * channels)
    start = _gradient(
        (rows, channels, fusion.groups, layout.count, parts.splits), fusion.eps, _flags(fusion)
    )
    start(parts.tables, tables, fusion.weight, fusion.bias, fusion.group_weight, out)
    dweight, dbias, *own = out[2 * rows * channels :].view(4, channels).unbind()
    if fusion.group_weight is not None and fusion.group_weight.shape[0] < channels:
        own = [d[: fusion.groups] for d in own]
    return out, (dweight, dbias, *own)


@lru_cache(maxsize=4096)
def _gradient(sizes: Any, eps: float, flags: Any) -> Launch:
    rows, channels, groups, _, splits = sizes[:5]
    grid, tile, warps = _tile(rows, channels, groups, splits)
    constants = *flags, *tile
    return Launch(channel_gradient_kernel, grid, (*sizes, eps), constants, warps)


def _flags(fusion: Channel) -> tuple[int, ...]:
    """SOURCE, AFFINE, OWN."""
    own = 0
    if fusion.group_weight is not None:
        own = 1 if fusion.group_weight.shape[0] == fusion.groups else 2
    constant = fusion.given is not None or fusion.rate is not None
    return int(constant), fusion.weight is not None, own


def _tile(
    rows: int, channels: int, groups: int, splits: int
) -> tuple[tuple[int], tuple[int, ...], int]:
    """The grid; D, ROWS, SPLITS, GROUPS, WIDE; warps."""
    columns = _columns(channels, groups)
    held = stages.rows_at_once(rows, splits, columns)
    assert held is not None
    deep = channels // groups
    wide = passes.power_of_two(deep)
    warps = stages.warps_for(held[0] * held[1] * columns)
    return (-(-groups // (columns // wide)),), (deep, *held, columns // wide, wide), warps


def _columns(channels: int, groups: int) -> int:
    """Of a program: one group, or several small ones."""
    return max(COLUMNS, passes.power_of_two(channels // groups))


def seen(fusion: Channel, tables: Tensor, rows: int, channels: int) -> Seen:
    if not _flags(fusion)[0]:
        return Seen()
    mean, var = tables[-2 * channels :].view(2, channels)
    return Seen({"running_mean": mean, "running_var": var}, fixed=True)


# ---------------------------------------------------------------- kernels


@triton.jit
def own_affine(table, channel, inside, D: tl.constexpr, OWN: tl.constexpr, other: tl.constexpr):
    """The group norm's parameter for each column: one a group (1), one a channel (2), none (0)."""
    if OWN == 1:
        return stages.of_channel(table, channel // D, inside, other)
    if OWN == 2:
        return stages.of_channel(table, channel, inside, other)
    return (channel * 0.0 + other)[None, :]


@triton.jit
def group_norm(
    apart, var, a1, beta, mask, eps, D: tl.constexpr, GROUPS: tl.constexpr, WIDE: tl.constexpr
):
    """Of the batch norm's output, from m − μ: M, r and the means' distance from M."""
    first = tl.where(mask, a1 * apart + beta, 0.0)
    middle = stages.group_sum(first, GROUPS, WIDE) / D
    apart = tl.where(mask, first - middle, 0.0)
    inner = tl.where(mask, a1 * a1 * var + apart * apart, 0.0)
    return middle, 1.0 / tl.sqrt(stages.group_sum(inner, GROUPS, WIDE) / D + eps), apart


@triton.jit
def group_norm_gradient(
    da, db, apart, var, a1, beta, g, mask, eps,
    D: tl.constexpr, GROUPS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """r, and the gradients of A, of each a₁²v and of each m₁, from those of a and b."""
    middle, r, distance = group_norm(apart, var, a1, beta, mask, eps, D, GROUPS, WIDE)
    dlarge = tl.where(mask, da * a1 + db * (beta - middle), 0.0)
    dinner = -0.5 * r * r * r * stages.group_sum(dlarge * g, GROUPS, WIDE) / D
    dfirst = 2.0 * dinner * distance - stages.group_sum(db * r * g, GROUPS, WIDE) / D
    return r, dlarge, dinner, dfirst


@triton.jit
def channel_map_kernel(
    parts, made, weight, bias, group_weight, group_bias, given_mean, given_var,
    batches, nonfinite, arrivals, rate,
    rows, C, groups, positions, splits, span, eps, momentum, correction,
    SOURCE: tl.constexpr, MICRO: tl.constexpr, AFFINE: tl.constexpr, OWN: tl.constexpr,
    REMEMBER: tl.constexpr, MAP: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
    SPLITS: tl.constexpr, GROUPS: tl.constexpr, WIDE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Makes one tensor: the map (3, N, C), the moments (2, N, C), the statistics (4, C) of the
    batch and those used. With MICRO the statistics to remember are about the old mean and enter at
    a rate that is read; they come before the map, which is another launch (MAP)."""
    channel, inside = stages.own_channels(groups, D, GROUPS, WIDE)
    size = rows * C
    map, tables, statistics = made, made + 3 * size, made + 5 * size
    own = channel[None, :]
    known = inside[None, :]
    stages.release(OVERLAP)
    stages.wait(OVERLAP)
    if MICRO and MAP:  # the first launch has pooled
        middle, var = tl.zeros((1, GROUPS * WIDE), tl.float32), tl.zeros((1, 1), tl.float32)
    else:
        middle, var = stages.pool_samples(
            parts, tables, weight, channel, inside, rows, C, positions, splits, span,
            False, ROWS, SPLITS,
        )  # fmt: skip
        second = var
        if MICRO:
            apart = middle - stages.of_channel(given_mean, channel, inside, 0.0)
            second = var + apart * apart
        tl.store(statistics + own, middle, mask=known)
        tl.store(statistics + C + own, second, mask=known)
    if MAP:
        if SOURCE == 1:
            middle = stages.of_channel(given_mean, channel, inside, 0.0)
            var = stages.of_channel(given_var, channel, inside, 1.0)
        tl.store(statistics + 2 * C + own, middle, mask=known)
        tl.store(statistics + 3 * C + own, var, mask=known)
        a1 = 1.0 / tl.sqrt(var + eps)
        beta = middle * 0.0
        if AFFINE:
            a1 = a1 * stages.of_channel(weight, channel, inside, 0.0)
            beta = stages.of_channel(bias, channel, inside, 0.0)
        g = own_affine(group_weight, channel, inside, D, OWN, 1.0)
        h = own_affine(group_bias, channel, inside, D, OWN, 0.0)
        for start in range(0, rows, ROWS):
            row = start + tl.arange(0, ROWS)
            mask = (row < rows)[:, None] & known
            at = row[:, None] * C + own
            m = tl.load(tables + at, mask=mask, other=0.0)
            v = tl.load(tables + size + at, mask=mask, other=0.0)
            center, r, _ = group_norm(m - middle, v, a1, beta, mask, eps, D, GROUPS, WIDE)
            tl.store(map + at, a1 * r * g, mask=mask)
            tl.store(map + size + at, (beta - center) * r * g + h, mask=mask)
            tl.store(map + 2 * size + at, middle + m * 0.0, mask=mask)
    if REMEMBER:
        new = momentum
        if MICRO:
            new = tl.load(rate)
        stages.remember(
            arrivals, statistics, given_mean, given_var, batches, nonfinite, statistics, C, new,
            correction, False, REMEMBER,
        )  # fmt: skip


@triton.jit
def channel_gradient_kernel(
    parts, made, weight, bias, group_weight, out,
    rows, C, groups, positions, splits, eps,
    SOURCE: tl.constexpr, AFFINE: tl.constexpr, OWN: tl.constexpr, D: tl.constexpr,
    ROWS: tl.constexpr, SPLITS: tl.constexpr, GROUPS: tl.constexpr, WIDE: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Constant and slope of dx (2, N, C), and gradients (4, C) of weight, bias, group_weight and
    group_bias; the last two per channel, or in the first column of each group."""
    channel, inside = stages.own_channels(groups, D, GROUPS, WIDE)
    size = rows * C
    tables, statistics = made + 3 * size, made + 5 * size
    extra, grads = out, out + 2 * size
    own = channel[None, :]
    known = inside[None, :]
    stages.release(OVERLAP)
    stages.wait(OVERLAP)
    middle = stages.of_channel(statistics + 2 * C, channel, inside, 0.0)
    scale = 1.0 / tl.sqrt(stages.of_channel(statistics + 3 * C, channel, inside, 1.0) + eps)
    gamma, beta = scale * 0.0 + 1.0, scale * 0.0
    if AFFINE:
        gamma = stages.of_channel(weight, channel, inside, 0.0)
        beta = stages.of_channel(bias, channel, inside, 0.0)
    a1 = scale * gamma
    g = own_affine(group_weight, channel, inside, D, OWN, 1.0)
    zero = tl.zeros((ROWS, GROUPS * WIDE), tl.float32)
    by_scale, by_shift, by_own, by_bias = zero, zero, zero, zero
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & known
        at = row[:, None] * C + own
        apart = tl.load(tables + at, mask=mask, other=0.0) - middle
        v = tl.load(tables + size + at, mask=mask, other=0.0)
        da, db = stages.summed_at_once(parts, at, mask, size, splits, SPLITS)
        r, dlarge, dinner, dfirst = group_norm_gradient(
            da, db, apart, v, a1, beta, g, mask, eps, D, GROUPS, WIDE
        )
        da1 = da * r * g + 2.0 * a1 * v * dinner + dfirst * apart
        by_scale += tl.where(mask, da1, 0.0)
        by_shift += tl.where(mask, db * r * g + dfirst, 0.0)
        by_own += dlarge * r
        by_bias += db
    dscale = tl.sum(by_scale, 0)[None, :]
    dshift = tl.sum(by_shift, 0)[None, :]
    tl.store(grads + own, dscale * scale, mask=known)
    tl.store(grads + C + own, dshift, mask=known)
    dg = tl.sum(by_own, 0)[None, :]
    dh = tl.sum(by_bias, 0)[None, :]
    if OWN == 1:
        dg, dh = stages.group_sum(dg, GROUPS, WIDE), stages.group_sum(dh, GROUPS, WIDE)
        first = known & (own % D == 0)
        tl.store(grads + 2 * C + own // D, dg, mask=first)
        tl.store(grads + 3 * C + own // D, dh, mask=first)
    else:
        tl.store(grads + 2 * C + own, dg, mask=known)
        tl.store(grads + 3 * C + own, dh, mask=known)
    pooled = 1.0 / rows
    if SOURCE == 1:
        pooled = 0.0
    dvar = -0.5 * scale * scale * scale * gamma * dscale * pooled
    dmiddle = -a1 * dshift * pooled
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & known
        at = row[:, None] * C + own
        apart = tl.load(tables + at, mask=mask, other=0.0) - middle
        v = tl.load(tables + size + at, mask=mask, other=0.0)
        da, db = stages.summed_at_once(parts, at, mask, size, splits, SPLITS)
        _, _, dinner, dfirst = group_norm_gradient(
            da, db, apart, v, a1, beta, g, mask, eps, D, GROUPS, WIDE
        )
        dm = a1 * dfirst + 2.0 * dvar * apart + dmiddle
        slope = 2.0 * (a1 * a1 * dinner + dvar) / positions
        tl.store(extra + at, dm / positions - apart * slope, mask=mask)
        tl.store(extra + size + at, slope, mask=mask)
