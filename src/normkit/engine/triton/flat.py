"""The four passes over short rows whose length no vector divides, as 7 × 7 maps in contiguous
memory are.

A row of 49 values starts anywhere, and would be loaded value by value. So a program takes CELLS
rows, as many as end at a multiple of 16 bytes, for one run of VECTORS × SPAN values, and a thread
loads a whole vector. A vector is no longer than a row, so it has values of two rows at most: of
``row``, its own, and of the next. It looks up the tables of both, and adds up the values of each
by itself; only these few sums are then brought together by rows, PIECES of each. Numbers and
tables are those of kernels.py; a row is one part.
"""

from __future__ import annotations

import triton
import triton.language as tl

from normkit.engine.triton.activations import activate, before
from normkit.engine.triton.stages import release, wait


@triton.jit
def run_of(
    program, M: tl.constexpr, CELLS: tl.constexpr, VECTORS: tl.constexpr, SPAN: tl.constexpr
):
    """Offsets of a run (VECTORS, SPAN), which of them are inside, each vector's row (VECTORS,), and
    which values are of it, not of the next."""
    start = tl.arange(0, VECTORS) * SPAN
    lane = tl.arange(0, SPAN)[None, :]
    row = tl.minimum(start // M, CELLS - 1)
    at = program.to(tl.int64) * (CELLS * M) + (start[:, None] + lane)
    mask = start[:, None] + lane < CELLS * M
    return at, mask, row, start[:, None] + lane < (row * M + M)[:, None]


@triton.jit
def entry_of(program, row, period, CELLS: tl.constexpr):
    """Where tables of ``period`` entries have that of a row; beside the run, some entry."""
    entry = program * CELLS % period + tl.minimum(row, CELLS - 1)
    if period < CELLS:
        entry = entry % period
    return tl.where(entry < period, entry, entry - period)


@triton.jit
def both(own, first, second):
    """What each value has, given that of its vector's row and of the next."""
    return tl.where(own, first[:, None], second[:, None])


@triton.jit
def _looked_up(table, entry, next, own):
    return both(own, tl.load(table + entry), tl.load(table + next))


@triton.jit
def pieces_of_rows(run, own, M: tl.constexpr, CELLS: tl.constexpr, PIECES: tl.constexpr):
    """The sums of each row's values over vectors, (CELLS, PIECES), and zeros. ``run`` is zero
    beside the rows."""
    VECTORS: tl.constexpr = run.shape[0]
    SPAN: tl.constexpr = run.shape[1]
    first = tl.sum(tl.where(own, run, 0.0), 1)
    second = tl.sum(tl.where(own, 0.0, run), 1)
    sums = tl.reshape(tl.join(first, second), (2 * VECTORS,))
    start = tl.arange(0, CELLS)[:, None] * M
    piece = tl.arange(0, PIECES)[None, :]
    vector = start // SPAN + piece
    inside = vector * SPAN < start + M
    behind = ((piece == 0) & (start % SPAN != 0)).to(tl.int32)  # there the row is the next
    place = tl.where(inside, 2 * vector + behind, 0)
    found = tl.gather(sums, tl.reshape(place, (CELLS * PIECES,)), 0)
    return tl.where(inside, tl.reshape(found, (CELLS, PIECES)), 0.0)


@triton.jit
def _values_of_pieces(
    M: tl.constexpr, CELLS: tl.constexpr, SPAN: tl.constexpr, PIECES: tl.constexpr
):
    """How many values a row has in each of its vectors."""
    start = tl.arange(0, CELLS)[:, None] * M
    begin = (start // SPAN + tl.arange(0, PIECES)[None, :]) * SPAN
    values = tl.minimum(begin + SPAN, start + M) - tl.maximum(begin, start)
    return tl.maximum(values, 0).to(tl.float32)


@triton.jit
def flat_moments_kernel(
    x, parts, period,
    M: tl.constexpr, CELLS: tl.constexpr, VECTORS: tl.constexpr, SPAN: tl.constexpr,
    PIECES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Mean of each row and its sum of squares about it.

    Values are taken less the row's first: a mean far from zero then costs no digits, and equal
    values have no variance. The values of a vector are about their own mean before vectors are
    merged about the common one, as in ``moments_kernel``.
    """
    program = tl.program_id(0)
    at, mask, row, own = run_of(program, M, CELLS, VECTORS, SPAN)
    cell = program * CELLS + tl.arange(0, CELLS)
    begin = x + program.to(tl.int64) * (CELLS * M)
    wait(OVERLAP)
    release(OVERLAP)
    value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    near = tl.load(x + cell.to(tl.int64) * M).to(tl.float32)
    value -= _looked_up(begin, row * M, tl.minimum(row + 1, CELLS - 1) * M, own).to(tl.float32)
    value = tl.where(mask, value, 0.0)
    sums = pieces_of_rows(value, own, M, CELLS, PIECES)
    squares = pieces_of_rows(value * value, own, M, CELLS, PIECES)
    count = _values_of_pieces(M, CELLS, SPAN, PIECES)
    middle = tl.sum(sums, 1) / M
    mean = sums / tl.maximum(count, 1.0)
    inner = tl.maximum(squares - sums * mean, 0.0)
    apart = mean - middle[:, None]
    tl.store(parts + cell, near + middle)
    tl.store(parts + tl.num_programs(0) * CELLS + cell, tl.sum(inner + count * apart * apart, 1))


@triton.jit
def flat_affine_kernel(
    x, map, residual, y, period,
    ACT: tl.constexpr, RESIDUAL: tl.constexpr,
    M: tl.constexpr, CELLS: tl.constexpr, VECTORS: tl.constexpr, SPAN: tl.constexpr,
    PIECES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """activation(scale · (x − center) + shift + residual)."""
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    at, mask, row, own = run_of(program, M, CELLS, VECTORS, SPAN)
    entry = entry_of(program, row, period, CELLS)
    next = entry_of(program, row + 1, period, CELLS)
    value = tl.load(x + at, mask=mask, other=0.0)
    wait(OVERLAP)
    a = _looked_up(map, entry, next, own)
    b = _looked_up(map + period, entry, next, own)
    c = _looked_up(map + 2 * period, entry, next, own)
    value = (value.to(tl.float32) - c) * a + b
    if RESIDUAL:
        value += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + at, activate(value, ACT).to(y.dtype.element_ty), mask=mask)


@triton.jit
def flat_sums_kernel(
    dy, x, map, residual, kept, parts, period,
    ACT: tl.constexpr, RESIDUAL: tl.constexpr, KEEP: tl.constexpr,
    M: tl.constexpr, CELLS: tl.constexpr, VECTORS: tl.constexpr, SPAN: tl.constexpr,
    PIECES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Σ g·(x − center) and Σ g of each row, g the gradient before the activation."""
    program = tl.program_id(0)
    at, mask, row, own = run_of(program, M, CELLS, VECTORS, SPAN)
    entry = entry_of(program, row, period, CELLS)
    next = entry_of(program, row + 1, period, CELLS)
    wait(OVERLAP)
    release(OVERLAP)
    value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(dy + at, mask=mask, other=0.0).to(tl.float32)
    value -= _looked_up(map + 2 * period, entry, next, own)
    if ACT != 0:
        pre = value * _looked_up(map, entry, next, own)
        pre += _looked_up(map + period, entry, next, own)
        if RESIDUAL:
            pre += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
        g = before(g, pre, ACT)
        if KEEP:
            tl.store(kept + at, g.to(kept.dtype.element_ty), mask=mask)
    cell = program * CELLS + tl.arange(0, CELLS)
    along = pieces_of_rows(tl.where(mask, g * value, 0.0), own, M, CELLS, PIECES)
    tl.store(parts + cell, tl.sum(along, 1))
    alone = pieces_of_rows(tl.where(mask, g, 0.0), own, M, CELLS, PIECES)
    tl.store(parts + tl.num_programs(0) * CELLS + cell, tl.sum(alone, 1))


@triton.jit
def flat_gradient_kernel(
    dy, x, map, residual, extra, dx, period,
    ACT: tl.constexpr, RESIDUAL: tl.constexpr, EXTRA: tl.constexpr,
    M: tl.constexpr, CELLS: tl.constexpr, VECTORS: tl.constexpr, SPAN: tl.constexpr,
    PIECES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """scale · g + constant + slope · (x − center)."""
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    at, mask, row, own = run_of(program, M, CELLS, VECTORS, SPAN)
    entry = entry_of(program, row, period, CELLS)
    next = entry_of(program, row + 1, period, CELLS)
    g = tl.load(dy + at, mask=mask, other=0.0)
    if ACT != 0 or EXTRA:
        value = tl.load(x + at, mask=mask, other=0.0)
    wait(OVERLAP)
    g = g.to(tl.float32)
    a = _looked_up(map, entry, next, own)
    if ACT != 0 or EXTRA:
        value = value.to(tl.float32) - _looked_up(map + 2 * period, entry, next, own)
    if ACT != 0:
        pre = value * a + _looked_up(map + period, entry, next, own)
        if RESIDUAL:
            pre += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
        g = before(g, pre, ACT)
    out = g * a
    if EXTRA:
        out += value * _looked_up(extra + period, entry, next, own)
        out += _looked_up(extra, entry, next, own)
    tl.store(dx + at, out.to(dx.dtype.element_ty), mask=mask)
