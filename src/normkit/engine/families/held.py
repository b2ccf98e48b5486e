"""Standardizations whose pools a program can hold: bn, gn, ln, in, each way in one launch.

The passes read x twice forward, x and dy twice backward: eight times over memory in all. Where all
values of a pool fit into the registers of one program, it reads them once, five times in all, and
there is nothing to wait for between launches. So it is for groups of a sample where they are not
too large, in either format, and for channels of the whole batch where maps are small. Forward may
be held and backward not.

A program has a tile of POSITIONS × (GROUPS · WIDE) cells. A pool is WIDE cells side by side, of
which ``members`` are there: the channels of a group, or with ACROSS the samples of a channel, whose
rows lie apart in memory. What comes out is what pool.py's kernels give, in the same tables.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from normkit.core.fusion import Fusion, Pool
from normkit.engine.activations import NUMBERS
from normkit.engine.families.family import ChannelLayout, FamilyTables
from normkit.engine.triton import passes, stages
from normkit.engine.triton.activations import activate, before
from normkit.engine.triton.forms import GRID_LIMIT, form_of, power_of_two
from normkit.engine.triton.launch import Launch

# values of a tile: with more of them a second program has no place beside it, and while one adds
# up nothing is read. Backward has x and dy to hold
LARGEST, LARGEST_BACKWARD = 16_384, 8_192
USUAL = 4_096  # that small pools are put together to
VALUES = 32  # of a tile, for each thread; with 16, kernels took 1.0 to 1.9 times as long
REGISTERS = 64  # that forward does with where values come 16 bits each and several at once
FEW = 2**20  # values of a tensor with short rows, which it pays to load one by one to launch less
SECTOR = 32  # bytes that memory gives at least: columns are no narrower


class Holding(NamedTuple):
    """How programs hold the pools of a tensor."""

    blocks: int  # programs for all groups
    samples: int  # times as many
    numbers: tuple[int, ...]  # turns, rows, C, groups, members
    tile: tuple[Any, ...]  # V, ROWS, ACROSS, D, POSITIONS, GROUPS, WIDE

    @property
    def size(self) -> int:
        return math.prod(self.tile[4:])

    @property
    def warps(self) -> int:
        return max(1, min(16, self.size // (32 * VALUES)))

    @property
    def backward(self) -> bool:
        """Whether the gradient is held, too."""
        return self.size <= LARGEST_BACKWARD

    @property
    def single(self) -> bool:
        """Whether values are loaded one by one, as those of 7 × 7 maps in rows are."""
        return self.tile[1] and self.tile[0] < 4


def holding(x: Tensor, fusion: Fusion, layout: ChannelLayout) -> Holding | None:
    """How, or None where a program cannot hold a pool, or has to do more than this."""
    if not isinstance(fusion, Pool) or fusion.ramps is not None:
        return None
    if fusion.kind == "sample" and fusion.memory is not None:
        return None
    return _holding(
        layout.extent, layout.rows, x.shape[1], fusion.groups, fusion.kind, x.element_size()
    )


@lru_cache(maxsize=4096)
def _holding(
    extent: tuple[int, ...], rows: int, channels: int, groups: int, kind: str, bytes: int
) -> Holding | None:
    form = form_of(extent)
    deep = channels // groups
    across = kind == "batch" and form.rows
    if kind == "batch" and deep != 1:
        return None
    if form.flat and math.prod(extent) > FEW:
        return None  # the passes of flat.py load vectors: 88 µs where this took 141
    members = rows if across else deep
    wide, positions = power_of_two(members), power_of_two(form.positions)
    samples = rows if kind == "sample" else 1
    size = wide * positions
    if size > LARGEST or samples > GRID_LIMIT or math.prod(extent) >= 2**31:
        return None
    many = min(power_of_two(groups), max(1, USUAL // size))
    if not form.rows and many * wide * bytes < SECTOR and many < groups:
        many = power_of_two(-(-SECTOR // (wide * bytes)))
        if many * size > LARGEST:
            return None
    numbers = form.turns, rows, channels, groups, members
    tile = form.shared, form.rows, across, deep, positions, many, wide
    return Holding(-(-groups // many), samples, numbers, tile)


def forward(
    x: Tensor,
    fusion: Pool,
    residual: Tensor | None,
    act: str,
    layout: ChannelLayout,
    held: Holding,
) -> tuple[Tensor, FamilyTables]:
    period, memory = held.samples * x.shape[1], fusion.memory
    tables = passes.table(x, 3 * period + 2 * held.samples * fusion.groups)
    y = passes.like(layout, x)
    start = _map(
        held,
        fusion.eps,
        (0.0, 1.0) if memory is None else memory[5:],
        (NUMBERS[act], residual is not None, fusion.weight is not None),
        stages.at_once(memory, fusion.groups),
        None if held.single or x.element_size() > 2 else REGISTERS,
    )
    start(
        layout.aligned(x),
        fusion.weight,
        fusion.bias,
        None if residual is None else layout.aligned(residual),
        y,
        tables,
        *((None,) * 5 if memory is None else memory[:5]),
    )
    return y, FamilyTables(tables, period, 3 * period, None)


@lru_cache(maxsize=4096)
def _map(
    held: Holding, eps: float, memory: Any, flags: Any, remembered: int, registers: int | None
) -> Launch:
    constants = *flags, remembered, *held.tile
    numbers = *held.numbers, eps, *memory
    grid = held.blocks, held.samples
    return Launch(held_map_kernel, grid, numbers, constants, held.warps, registers=registers)


def backward(
    grad: Tensor,
    x: Tensor,
    fusion: Pool,
    residual: Tensor | None,
    act: str,
    layout: ChannelLayout,
    held: Holding,
    tables: Tensor,
    grad_residual: bool,
) -> tuple[Tensor, Tensor | None, tuple[Tensor | None, ...]]:
    """dx, the residual's gradient, those of the parameters."""
    channels = x.shape[1]
    period = held.samples * channels
    out = passes.table(x, 4 * period if held.samples == 1 else 2 * period)
    dx = passes.like(layout, x)
    kept = passes.like(layout, x) if grad_residual and act != "none" else None
    start = _gradient(
        held,
        fusion.eps,
        (NUMBERS[act], residual is not None, kept is not None, fusion.weight is not None),
    )
    start(
        layout.aligned(grad),
        layout.aligned(x),
        fusion.weight,
        tables,
        None if residual is None else layout.aligned(residual),
        kept,
        dx,
        out,
    )
    dr = grad if grad_residual and act == "none" else kept
    if fusion.weight is None:
        return dx, dr, (None, None)
    if held.samples == 1:
        return dx, dr, (out[2 * channels : 3 * channels], out[3 * channels :])
    summed = passes.summed_rows(out, 0, 2, held.samples)
    return dx, dr, (summed[:channels], summed[channels:])


@lru_cache(maxsize=4096)
def _gradient(held: Holding, eps: float, flags: Any) -> Launch:
    whole = held.samples == 1  # constant and slope are written as well, as pool.gradients does
    constants = *flags, whole, *held.tile
    numbers = *held.numbers, eps
    grid = held.blocks, held.samples
    return Launch(held_gradient_kernel, grid, numbers, constants, held.warps)


# ---------------------------------------------------------------- kernels


@triton.jit
def _cells(
    rows, C, groups, M, ROWS: tl.constexpr, ACROSS: tl.constexpr, D: tl.constexpr,
    POSITIONS: tl.constexpr, GROUPS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Where the tile lies, (POSITIONS, CELLS), and what of it is there; the pool of each cell, and
    its channel.

    What all cells share is one entry, not one of each: of a single pool, or its channel, ACROSS.
    Offsets are 32-bit, for they stay in registers.
    """
    column = tl.arange(0, GROUPS * WIDE)
    position = tl.arange(0, POSITIONS)
    sample = tl.program_id(1)
    pool = tl.program_id(0) * GROUPS + (tl.arange(0, 1) if GROUPS == 1 else column // WIDE)
    if ACROSS:
        sample = column % WIDE
        channel = pool
        inside = (pool < groups) & (sample < rows)
    elif D == WIDE:  # in a form that shows that neighbours are neighbours in memory
        channel = tl.program_id(0) * (GROUPS * WIDE) + column
        inside = channel < C
    else:
        channel = pool * D + column % WIDE
        inside = (pool < groups) & (column % WIDE < D)
    if ROWS:
        at = (sample * C + channel)[None, :] * M + position[:, None]
    else:
        at = (sample * M + position)[:, None] * C + channel[None, :]
    return at, (position < M)[:, None] & inside[None, :], pool, channel


@triton.jit
def _pooled(cells, GROUPS: tl.constexpr, WIDE: tl.constexpr):
    """The sum over each pool of what its cells have: for each of them, or once for all."""
    if GROUPS == 1:
        total = tl.sum(cells, 0) + tl.zeros((1,), tl.float32)
    else:
        total = stages.group_total(cells, GROUPS, WIDE)
    return total


@triton.jit
def held_map_kernel(
    x, weight, bias, residual, y, made, running_mean, running_second, batches, nonfinite, arrivals,
    turns, rows, C, groups, members, eps, momentum, correction,
    ACT: tl.constexpr, RESIDUAL: tl.constexpr, AFFINE: tl.constexpr, REMEMBER: tl.constexpr,
    V: tl.constexpr, ROWS: tl.constexpr, ACROSS: tl.constexpr, D: tl.constexpr,
    POSITIONS: tl.constexpr, GROUPS: tl.constexpr, WIDE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """activation(γ·(x − mean)/√(var + eps) + β + residual), and the tables that lead to it."""
    M = turns * V
    sample, samples = tl.program_id(1), tl.num_programs(1)
    at, mask, pool, channel = _cells(rows, C, groups, M, ROWS, ACROSS, D, POSITIONS, GROUPS, WIDE)
    values = members * 1.0 * M
    stages.wait(OVERLAP)
    stages.release(OVERLAP)
    value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    # less one value of the pool: sums of differences round less, and equal values leave nothing
    leader = pool * D
    near = (sample * C + leader) * M if ROWS else sample * M * C + leader
    near = tl.load(x + near, mask=pool < groups, other=0.0).to(tl.float32)
    apart = tl.where(mask, value - near[None, :], 0.0)
    mean = near + _pooled(tl.sum(apart, 0), GROUPS, WIDE) / values
    value -= mean[None, :]
    square = tl.where(mask, value * value, 0.0)
    var = _pooled(tl.sum(square, 0), GROUPS, WIDE) / values
    there = channel < C
    a = 1.0 / tl.sqrt(var + eps) + tl.zeros(channel.shape, tl.float32)
    b = tl.zeros(channel.shape, tl.float32)
    if AFFINE:
        a = a * tl.load(weight + channel, mask=there, other=0.0).to(tl.float32)
        b = b + tl.load(bias + channel, mask=there, other=0.0).to(tl.float32)
    value = value * a[None, :] + b[None, :]
    if RESIDUAL:
        value += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + at, activate(value, ACT).to(y.dtype.element_ty), mask=mask)
    # cells that share an entry write the same
    there = (channel < C) & (pool < groups) & (channel < leader + D)
    table = samples * C
    entry = sample * C + channel
    tl.store(made + entry, a, mask=there)
    tl.store(made + table + entry, b, mask=there)
    tl.store(made + 2 * table + entry, mean + tl.zeros(channel.shape, tl.float32), mask=there)
    statistics = made + 3 * table + sample * groups
    tl.store(statistics + pool, mean, mask=pool < groups)
    tl.store(statistics + samples * groups + pool, var, mask=pool < groups)
    if REMEMBER:
        stages.remember(
            arrivals, statistics, running_mean, running_second, batches, nonfinite, statistics,
            groups, momentum, correction, False, REMEMBER,
        )  # fmt: skip


@triton.jit
def held_gradient_kernel(
    dy, x, weight, made, residual, kept, dx, out,
    turns, rows, C, groups, members, eps,
    ACT: tl.constexpr, RESIDUAL: tl.constexpr, KEEP: tl.constexpr, AFFINE: tl.constexpr,
    SHARED: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, ACROSS: tl.constexpr,
    D: tl.constexpr, POSITIONS: tl.constexpr, GROUPS: tl.constexpr, WIDE: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """dx, and of each sample the gradients of γ and β, (2, R, C); g where a residual needs it.
    SHARED: all samples have one map, and constant and slope come before these, (4, 1, C)."""
    M = turns * V
    sample, samples = tl.program_id(1), tl.num_programs(1)
    at, mask, pool, channel = _cells(rows, C, groups, M, ROWS, ACROSS, D, POSITIONS, GROUPS, WIDE)
    values = members * 1.0 * M
    table = samples * C
    entry = sample * C + channel
    there = (channel < C) & (pool < groups) & (channel < pool * D + D)
    statistics = made + 3 * table + sample * groups + pool
    stages.wait(OVERLAP)
    stages.release(OVERLAP)
    value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(dy + at, mask=mask, other=0.0).to(tl.float32)
    a = tl.load(made + entry, mask=there, other=0.0)
    mean = tl.load(statistics, mask=pool < groups, other=0.0)
    var = tl.load(statistics + samples * groups, mask=pool < groups, other=1.0)
    value -= mean[None, :]
    if ACT != 0:
        b = tl.load(made + table + entry, mask=there, other=0.0)
        pre = value * a[None, :] + b[None, :]
        if RESIDUAL:
            pre += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
        g = before(g, pre, ACT)
        if KEEP:
            tl.store(kept + at, g.to(kept.dtype.element_ty), mask=mask)
    about = tl.sum(tl.where(mask, g * value, 0.0), 0)
    db = tl.sum(tl.where(mask, g, 0.0), 0)
    if ACROSS:
        about = _pooled(about, GROUPS, WIDE)
        db = _pooled(db, GROUPS, WIDE)
    inverse = 1.0 / tl.sqrt(var + eps)
    begin = 2 * table if SHARED else 0
    tl.store(out + begin + entry, about * inverse, mask=there)
    tl.store(out + begin + table + entry, db, mask=there)
    if AFFINE:
        gamma = tl.load(weight + channel, mask=there, other=0.0).to(tl.float32)
        about = about * gamma
        db = db * gamma
    if not ACROSS:
        about = _pooled(about, GROUPS, WIDE)
        db = _pooled(db, GROUPS, WIDE)
    slope = -about * inverse * inverse * inverse / values
    constant = -db * inverse / values
    if SHARED:
        tl.store(out + entry, constant + tl.zeros(channel.shape, tl.float32), mask=there)
        tl.store(out + table + entry, slope + tl.zeros(channel.shape, tl.float32), mask=there)
    result = g * a[None, :]
    result += value * slope[None, :] + constant[None, :]
    tl.store(dx + at, result.to(dx.dtype.element_ty), mask=mask)
