"""The building blocks of coefficient kernels: merging parts, pooling, remembering.

A kernel that makes coefficients works on tiles (ROWS, COLS) of tables (N, C), one row a sample.
A program owns COLS = GROUPS · WIDE columns, whole groups of D ≤ WIDE channels, and goes through all
rows. Sums over a group stand in every column of that group, so that they combine like any table.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from normkit.engine.triton.forms import power_of_two

ENTRIES = 4096  # of the parts' tables that a program holds


def rows_at_once(rows: int, splits: int, columns: int) -> tuple[int, int] | None:
    """ROWS and SPLITS of a kernel that goes through the parts of all samples; None if there are so
    many parts that they must be merged before."""
    many = power_of_two(splits)
    if many * columns > ENTRIES:
        return None if many > 1 else (1, 1)
    return min(power_of_two(rows), ENTRIES // (many * columns)), many


def at_once(memory: Any, size: int) -> int:
    """How many of ``size`` statistics are remembered at once; 0 if none are."""
    return 0 if memory is None else min(power_of_two(size), 2048)


def warps_for(entries: int) -> int:
    """Warps of a program that holds so many entries of a table: 8 of each are a thread's."""
    return max(4, min(16, entries // 256))


@triton.jit
def wait(OVERLAP: tl.constexpr):
    """Until the kernel in front has ended, and what it wrote can be read: see launch.py."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()


@triton.jit
def release(OVERLAP: tl.constexpr):
    """The next kernel may be placed beside this one, once all programs have come here."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def own_channels(groups, D: tl.constexpr, GROUPS: tl.constexpr, WIDE: tl.constexpr):
    """The channels (COLS,) of this program, and which of its columns have one."""
    column = tl.arange(0, GROUPS * WIDE)
    group = tl.program_id(0) * GROUPS + column // WIDE
    member = column % WIDE
    return group * D + member, (group < groups) & (member < D)


@triton.jit
def group_sum(table, GROUPS: tl.constexpr, WIDE: tl.constexpr):
    """The sum over each group of columns of a tile (ROWS, COLS), in every column of the group."""
    if WIDE == 1:
        return table
    rows: tl.constexpr = table.shape[0]
    total = tl.sum(tl.reshape(table, (rows, GROUPS, WIDE)), 2)
    spread = tl.broadcast_to(total[:, :, None], (rows, GROUPS, WIDE))
    return tl.reshape(spread, (rows, GROUPS * WIDE))


@triton.jit
def group_total(row, GROUPS: tl.constexpr, WIDE: tl.constexpr):
    """The same for a single row (COLS,)."""
    if WIDE == 1:
        return row
    total = tl.sum(tl.reshape(row, (GROUPS, WIDE)), 1)
    return tl.reshape(tl.broadcast_to(total[:, None], (GROUPS, WIDE)), (GROUPS * WIDE,))


@triton.jit
def of_channel(table, channel, inside, other: tl.constexpr):
    """Entries of a parameter or statistic (C,) as a row of a tile."""
    return tl.load(table + channel, mask=inside, other=other).to(tl.float32)[None, :]


@triton.jit
def merged_moments(parts, at, mask, size, positions, splits, span):
    """Mean and variance of whole cells, from those of their splits: parts (2, splits, size)."""
    near = tl.load(parts + at, mask=mask, other=0.0)
    mean = tl.zeros(at.shape, tl.float32)
    for split in range(1, splits):
        count = tl.minimum(positions - split * span, span).to(tl.float32)
        mean += count * (tl.load(parts + split * size + at, mask=mask, other=0.0) - near)
    mean = near + mean / positions
    square = tl.zeros(at.shape, tl.float32)
    for split in range(splits):
        count = tl.minimum(positions - split * span, span).to(tl.float32)
        apart = tl.load(parts + split * size + at, mask=mask, other=0.0) - mean
        inner = tl.load(parts + (splits + split) * size + at, mask=mask, other=0.0)
        square += tl.where(mask, inner + count * apart * apart, 0.0)
    return mean, square / positions


@triton.jit
def merged_at_once(parts, at, mask, size, positions, splits, span, SPLITS: tl.constexpr):
    """The same for a tile of rows and columns, all splits in registers."""
    split = tl.arange(0, SPLITS)[:, None, None]
    there = (split < splits) & mask[None, :, :]
    count = tl.minimum(positions - split * span, span).to(tl.float32)
    near = tl.load(parts + at, mask=mask, other=0.0)
    means = tl.load(parts + split * size + at[None, :, :], mask=there, other=0.0)
    inner = tl.load(parts + (splits + split) * size + at[None, :, :], mask=there, other=0.0)
    apart = tl.where(there, count * (means - near[None, :, :]), 0.0)
    mean = near + tl.sum(apart, 0) / positions
    apart = means - mean[None, :, :]
    square = tl.sum(tl.where(there, inner + count * apart * apart, 0.0), 0)
    return mean, square / positions


@triton.jit
def summed(parts, at, mask, size, splits):
    """Σ g·(x − center) and Σ g of whole cells."""
    da = tl.zeros(at.shape, tl.float32)
    db = tl.zeros(at.shape, tl.float32)
    for split in range(splits):
        da += tl.load(parts + split * size + at, mask=mask, other=0.0)
        db += tl.load(parts + (splits + split) * size + at, mask=mask, other=0.0)
    return da, db


@triton.jit
def summed_at_once(parts, at, mask, size, splits, SPLITS: tl.constexpr):
    """The same for a tile of rows and columns, all splits in registers."""
    split = tl.arange(0, SPLITS)[:, None, None]
    there = (split < splits) & mask[None, :, :]
    scales = tl.load(parts + split * size + at[None, :, :], mask=there, other=0.0)
    shifts = tl.load(parts + (splits + split) * size + at[None, :, :], mask=there, other=0.0)
    return tl.sum(scales, 0), tl.sum(shifts, 0)


@triton.jit
def pool_samples(
    parts, tables, center, channel, inside, rows, C, positions, splits, span,
    CENTER: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Moments of each sample into tables (2, N, C), and the pool of all samples, (1, COLS).

    With CENTER it is the pool of x + w·m, whose means are (1 + w)·m and whose variances are x's.
    """
    size = rows * C
    factor = 1.0 + (of_channel(center, channel, inside, 0.0) if CENTER else 0.0)
    near = of_channel(parts, channel, inside, 0.0)
    total = tl.zeros((ROWS, channel.shape[0]), tl.float32)
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & inside[None, :]
        at = row[:, None] * C + channel[None, :]
        mean, var = merged_at_once(parts, at, mask, size, positions, splits, span, SPLITS)
        tl.store(tables + at, mean, mask=mask)
        tl.store(tables + size + at, var, mask=mask)
        total += tl.where(mask, mean - near, 0.0)
    tl.debug_barrier()  # the tables are read again by other threads
    middle = near + tl.sum(total, 0)[None, :] / rows
    total = tl.zeros((ROWS, channel.shape[0]), tl.float32)
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & inside[None, :]
        at = row[:, None] * C + channel[None, :]
        apart = (tl.load(tables + at, mask=mask, other=0.0) - middle) * factor
        inner = tl.load(tables + size + at, mask=mask, other=0.0)
        total += tl.where(mask, inner + apart * apart, 0.0)
    return middle * factor, tl.sum(total, 0)[None, :] / rows


@triton.jit
def remember(
    arrivals, statistics, running_mean, running_second, batches, nonfinite, wanted, size, weight,
    correction, CONDITION: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """running ← (1 − weight)·running + weight·new for all channels, or for none if a statistic
    is not finite; counts which. With CONDITION, only where ``wanted`` is not 0.

    Done by the last program to arrive, which sees what all others wrote: nobody may write before
    all statistics are known.
    """
    tl.debug_barrier()
    if tl.atomic_add(arrivals, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        tl.store(arrivals, 0)  # ready for the next launch
        bad = tl.zeros((WIDTH,), tl.int32)
        for start in range(0, 2 * size, WIDTH):
            entry = start + tl.arange(0, WIDTH)
            value = tl.load(statistics + entry, mask=entry < 2 * size, other=0.0)
            bad += ((value - value) != 0.0).to(tl.int32)  # inf − inf and NaN are not 0
        good = tl.sum(bad, 0) == 0
        tl.store(batches, tl.load(batches) + good.to(tl.int64))
        tl.store(nonfinite, tl.load(nonfinite) + (1 - good.to(tl.int64)))
        if CONDITION:
            good = good & (tl.load(wanted) != 0)
        for start in range(0, size, WIDTH):
            entry = start + tl.arange(0, WIDTH)
            mask = entry < size
            old = tl.load(running_mean + entry, mask=mask, other=0.0)
            new = old + weight * (tl.load(statistics + entry, mask=mask, other=0.0) - old)
            tl.store(running_mean + entry, tl.where(good, new, old), mask=mask)
            old = tl.load(running_second + entry, mask=mask, other=0.0)
            new = tl.load(statistics + size + entry, mask=mask, other=0.0) * correction
            new = old + weight * (new - old)
            tl.store(running_second + entry, tl.where(good, new, old), mask=mask)


@triton.jit
def remember_kernel(
    made, running_mean, running_second, batches, nonfinite, arrivals,
    begin, size, weight, correction, WIDTH: tl.constexpr,
):  # fmt: skip
    """One program. The statistics stand at ``begin``."""
    statistics = made + begin
    remember(
        arrivals, statistics, running_mean, running_second, batches, nonfinite, statistics, size,
        weight, correction, False, WIDTH,
    )  # fmt: skip
