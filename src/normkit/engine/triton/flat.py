"""The four passes over short rows whose length no vector divides, as 7 × 7 maps in contiguous
memory are.

A row of 49 values starts anywhere, and would be loaded value by value. So a program takes CELLS
rows, as many as end at a multiple of 16 bytes, for one run of FLAT values, loads that run whole and
looks the tables up value by value. Sums over rows exchange the values between threads. Numbers and
tables are those of kernels.py; a row is one part.
"""

from __future__ import annotations

import triton
import triton.language as tl

from normkit.engine.triton.activations import activate, before
from normkit.engine.triton.stages import release, wait


@triton.jit
def _run(program, period, M: tl.constexpr, CELLS: tl.constexpr, FLAT: tl.constexpr):
    """Offsets of a run, which of them are inside, and their entries in the tables."""
    lane = tl.arange(0, FLAT)
    entry = program * CELLS % period + lane // M
    if CELLS * M < FLAT:
        entry = tl.minimum(entry, program * CELLS % period + CELLS - 1)
    if period < CELLS:
        entry = entry % period
    entry = tl.where(entry < period, entry, entry - period)
    return program.to(tl.int64) * (CELLS * M) + lane, lane < CELLS * M, entry


@triton.jit
def _by_rows(run, M: tl.constexpr, CELLS: tl.constexpr, WIDE: tl.constexpr):
    """A run as a tile (CELLS, WIDE), zero beside the rows."""
    position = tl.arange(0, WIDE)
    inside = (position < M)[None, :]
    place = tl.arange(0, CELLS)[:, None] * M + tl.where(inside, position[None, :], 0)
    tile = tl.gather(run, tl.reshape(place, (CELLS * WIDE,)), 0)
    return tl.where(inside, tl.reshape(tile, (CELLS, WIDE)), 0.0), inside


@triton.jit
def flat_moments_kernel(
    x, parts, period,
    M: tl.constexpr, CELLS: tl.constexpr, FLAT: tl.constexpr, WIDE: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Mean of each row and its sum of squares about it.

    Values are taken less the row's first: a mean far from zero then costs no digits, and equal
    values have no variance, however a sum of them or its quotient is rounded.
    """
    program = tl.program_id(0)
    at, mask, _ = _run(program, period, M, CELLS, FLAT)
    cell = program * CELLS + tl.arange(0, CELLS)
    wait(OVERLAP)
    release(OVERLAP)
    value = tl.load(x + at, mask=mask, other=0.0)
    near = tl.load(x + cell.to(tl.int64) * M).to(tl.float32)
    tile, inside = _by_rows(value.to(tl.float32), M, CELLS, WIDE)
    apart = tl.where(inside, tile - near[:, None], 0.0)
    middle = tl.sum(apart, 1) / M
    apart = tl.where(inside, apart - middle[:, None], 0.0)
    tl.store(parts + cell, near + middle)
    tl.store(parts + tl.num_programs(0) * CELLS + cell, tl.sum(apart * apart, 1))


@triton.jit
def flat_affine_kernel(
    x, map, residual, y, period,
    ACT: tl.constexpr, RESIDUAL: tl.constexpr,
    M: tl.constexpr, CELLS: tl.constexpr, FLAT: tl.constexpr, WIDE: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """activation(scale · (x − center) + shift + residual)."""
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    at, mask, entry = _run(program, period, M, CELLS, FLAT)
    value = tl.load(x + at, mask=mask, other=0.0)
    wait(OVERLAP)
    a = tl.load(map + entry)
    b = tl.load(map + period + entry)
    c = tl.load(map + 2 * period + entry)
    value = (value.to(tl.float32) - c) * a + b
    if RESIDUAL:
        value += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + at, activate(value, ACT).to(y.dtype.element_ty), mask=mask)


@triton.jit
def flat_sums_kernel(
    dy, x, map, residual, kept, parts, period,
    ACT: tl.constexpr, RESIDUAL: tl.constexpr, KEEP: tl.constexpr,
    M: tl.constexpr, CELLS: tl.constexpr, FLAT: tl.constexpr, WIDE: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Σ g·(x − center) and Σ g of each row, g the gradient before the activation."""
    program = tl.program_id(0)
    at, mask, entry = _run(program, period, M, CELLS, FLAT)
    wait(OVERLAP)
    release(OVERLAP)
    value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(dy + at, mask=mask, other=0.0).to(tl.float32)
    value -= tl.load(map + 2 * period + entry)
    if ACT != 0:
        pre = value * tl.load(map + entry) + tl.load(map + period + entry)
        if RESIDUAL:
            pre += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
        g = before(g, pre, ACT)
        if KEEP:
            tl.store(kept + at, g.to(kept.dtype.element_ty), mask=mask)
    by_scale, _ = _by_rows(g * value, M, CELLS, WIDE)
    by_shift, _ = _by_rows(g, M, CELLS, WIDE)
    cell = program * CELLS + tl.arange(0, CELLS)
    tl.store(parts + cell, tl.sum(by_scale, 1))
    tl.store(parts + tl.num_programs(0) * CELLS + cell, tl.sum(by_shift, 1))


@triton.jit
def flat_gradient_kernel(
    dy, x, map, residual, extra, dx, period,
    ACT: tl.constexpr, RESIDUAL: tl.constexpr, EXTRA: tl.constexpr,
    M: tl.constexpr, CELLS: tl.constexpr, FLAT: tl.constexpr, WIDE: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """scale · g + constant + slope · (x − center)."""
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    at, mask, entry = _run(program, period, M, CELLS, FLAT)
    g = tl.load(dy + at, mask=mask, other=0.0)
    if ACT != 0 or EXTRA:
        value = tl.load(x + at, mask=mask, other=0.0)
    wait(OVERLAP)
    g = g.to(tl.float32)
    a = tl.load(map + entry)
    if ACT != 0 or EXTRA:
        value = value.to(tl.float32) - tl.load(map + 2 * period + entry)
    if ACT != 0:
        pre = value * a + tl.load(map + period + entry)
        if RESIDUAL:
            pre += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
        g = before(g, pre, ACT)
    out = g * a
    if EXTRA:
        out += value * tl.load(extra + period + entry) + tl.load(extra + entry)
    tl.store(dx + at, out.to(dx.dtype.element_ty), mask=mask)
