"""The kernels of the four passes: what reads and writes activations.

A tensor is shown to a kernel in one of two forms, in both of which a cell is a line of positions:

    columns   (B, M, K): cell k of block b has its positions K apart; neighbours in memory are
              neighbouring cells (channels_last)
    rows      (R, M): cell r has its positions side by side (contiguous); B = 1, K = R

A map is three tables of ``period`` entries, scale, shift and center, one after the other: the value
is scale · (x − center) + shift. What dx has beside the map are two, constant and slope. The period
is that of all cells, or of the channels if all samples share one map. A tile is CELLS × POSITIONS
of one block. Offsets into tensors are 64-bit, those into tables 32-bit: tensors may exceed 2³¹
elements. Arithmetic is float32 throughout.

M comes as M/V and V, a power of two that divides it: the compiler then knows that rows of M start
at multiples of V, and loads V values at once.

With OVERLAP a kernel may be started before the one in front of it has ended (launch.py): what that
one wrote is there only behind ``wait``. x and dy are older than that and are asked for before.
"""

from __future__ import annotations

import triton
import triton.language as tl

from normkit.engine.triton.activations import activate, before
from normkit.engine.triton.stages import release, wait


@triton.jit
def _tile(block, cell, position, M, K, ROWS: tl.constexpr):
    """Offsets (POSITIONS, CELLS) of a tile in memory."""
    if ROWS:
        return cell.to(tl.int64)[None, :] * M + position[:, None]
    start = block.to(tl.int64) * M * K
    return start + position.to(tl.int64)[:, None] * K + cell[None, :]


@triton.jit
def _one(block, cell, position, M, K, ROWS: tl.constexpr):
    """Offsets (CELLS,) of one position of each cell."""
    if ROWS:
        return cell.to(tl.int64) * M + position
    return (block.to(tl.int64) * M + position) * K + cell


@triton.jit
def _own_tile(K, splits, depth, programs, WAVE: tl.constexpr, CELLS: tl.constexpr):
    """Block, tile of cells and tile of positions of a program that maps one tile.

    What the reduction in front read last is still in the cache, and is read first: maps go through
    memory backwards. ``programs`` programs of the reduction went through ``depth`` tiles each, side
    by side if all of them had a place at once (WAVE), else one after the other.
    """
    place = tl.program_id(0)
    if WAVE:
        turn = place // programs
        program = place % programs
    else:
        turn = place % depth
        program = place // depth
    turn = depth - 1 - turn
    program = programs - 1 - program
    tiles = tl.cdiv(K, CELLS)
    rest = program // tiles
    return rest // splits, program % tiles, rest % splits * depth + turn


@triton.jit
def _read(pointer, mask, EVEN: tl.constexpr):
    """A tile; EVEN: all of it is inside."""
    value = tl.load(pointer) if EVEN else tl.load(pointer, mask=mask, other=0.0)
    return value.to(tl.float32)


@triton.jit
def _inside(position, last, cell, K, WHOLE: tl.constexpr):
    """Which values of a tile there are; WHOLE: of all its cells."""
    mask = (position < last)[:, None]
    if not WHOLE:
        mask = mask & (cell < K)[None, :]
    return mask


@triton.jit
def _folded(tile, UNROLL: tl.constexpr):
    """UNROLL tiles, one above the other, added up: each thread adds what it has."""
    if UNROLL > 1:
        rows: tl.constexpr = tile.shape[0] // UNROLL
        tile = tl.sum(tl.reshape(tile, (UNROLL, rows, tile.shape[1])), 0)
    return tile


@triton.jit
def moments_kernel(
    x, parts, turns, K, span,
    V: tl.constexpr, ROWS: tl.constexpr, POSITIONS: tl.constexpr, CELLS: tl.constexpr,
    UNROLL: tl.constexpr, EVEN: tl.constexpr, WHOLE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Mean and sum of squares about it of ``span`` positions of each cell, one read of x.

    No reduction stands in the loop, and UNROLL tiles are asked for at once. Values are taken less
    one of them, or in float32 the mean of four: the squares about that are at most 1 + n times
    those about the mean of n values, whatever the mean, and mostly about as large; so little
    cancels, and a mean far from zero costs no digits. Every lane of the tile is about its own mean
    before lanes are merged about the common one. Out: parts (2, splits, B, K).
    """
    M = turns * V
    split, block = tl.program_id(1), tl.program_id(2)
    cell = tl.program_id(0) * CELLS + tl.arange(0, CELLS)
    first = split * span
    last = tl.minimum(first + span, M)
    wait(OVERLAP)
    release(OVERLAP)
    near = tl.load(x + _one(block, cell, first, M, K, ROWS), mask=cell < K, other=0.0)
    near = near.to(tl.float32)
    if x.dtype.element_ty == tl.float32:  # narrower values have fewer digits than a sum keeps
        for quarter in tl.static_range(1, 4):
            some = first + (last - first) // 4 * quarter
            near += tl.load(x + _one(block, cell, some, M, K, ROWS), mask=cell < K, other=0.0)
        near *= 0.25
    sums = tl.zeros((POSITIONS, CELLS), tl.float32)
    squares = tl.zeros((POSITIONS, CELLS), tl.float32)
    for start in range(first, last, POSITIONS * UNROLL):
        position = start + tl.arange(0, POSITIONS * UNROLL)
        mask = _inside(position, last, cell, K, WHOLE)
        at = _tile(block, cell, position, M, K, ROWS)
        apart = _read(x + at, mask, EVEN) - near[None, :]
        if not EVEN:
            apart = tl.where(mask, apart, 0.0)
        sums += _folded(apart, UNROLL)
        squares += _folded(apart * apart, UNROLL)
    # how many values each lane has seen: the last lanes may have missed the last turn
    lane = tl.arange(0, POSITIONS)
    count = ((last - first - lane + POSITIONS - 1) // POSITIONS).to(tl.float32)[:, None]
    middle = tl.sum(sums, 0) / (last - first).to(tl.float32)
    mean = sums / tl.maximum(count, 1.0)
    inner = tl.maximum(squares - sums * mean, 0.0)
    apart = mean - middle[None, :]
    total = tl.sum(inner + count * apart * apart, 0)
    out = (split * tl.num_programs(2) + block).to(tl.int64) * K + cell
    second = (tl.num_programs(1) * tl.num_programs(2)).to(tl.int64) * K
    tl.store(parts + out, near + middle, mask=cell < K)
    tl.store(parts + second + out, total, mask=cell < K)


@triton.jit
def rows_kernel(
    tables, out, begin, rows, size,
    DEPTH: tl.constexpr, WIDTH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Sums over the rows of one table (rows, size) a program id of the second axis."""
    entry = (tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)).to(tl.int64)
    outer = tl.program_id(1).to(tl.int64)
    total = tl.zeros((DEPTH, WIDTH), tl.float32)
    release(OVERLAP)
    wait(OVERLAP)
    for start in range(0, rows, DEPTH):
        row = start + tl.arange(0, DEPTH)
        mask = (row < rows)[:, None] & (entry < size)[None, :]
        at = begin + (outer * rows + row.to(tl.int64))[:, None] * size + entry[None, :]
        total += tl.load(tables + at, mask=mask, other=0.0)
    tl.store(out + outer * size + entry, tl.sum(total, 0), mask=entry < size)


@triton.jit
def merge_kernel(
    parts, found, M, size, splits, span,
    SUMS: tl.constexpr, DEPTH: tl.constexpr, WIDTH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Moments of whole cells (2, size) from those of their splits (2, splits, size); with SUMS, not
    the variance but the sum of squares, so that they are parts of one split.

    First the common mean, then the squares about it: the tables are small and in the cache.
    """
    entry = (tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)).to(tl.int64)
    squares = parts + splits * size
    release(OVERLAP)
    wait(OVERLAP)
    near = tl.load(parts + entry, mask=entry < size, other=0.0)
    total = tl.zeros((DEPTH, WIDTH), tl.float32)
    for start in range(0, splits, DEPTH):
        split = start + tl.arange(0, DEPTH)
        mask = (split < splits)[:, None] & (entry < size)[None, :]
        count = tl.minimum(M - split * span, span).to(tl.float32)[:, None]
        at = split.to(tl.int64)[:, None] * size + entry[None, :]
        apart = tl.load(parts + at, mask=mask, other=0.0) - near[None, :]
        total += tl.where(mask, count * apart, 0.0)
    mean = near + tl.sum(total, 0) / M
    total = tl.zeros((DEPTH, WIDTH), tl.float32)
    for start in range(0, splits, DEPTH):
        split = start + tl.arange(0, DEPTH)
        mask = (split < splits)[:, None] & (entry < size)[None, :]
        count = tl.minimum(M - split * span, span).to(tl.float32)[:, None]
        at = split.to(tl.int64)[:, None] * size + entry[None, :]
        apart = tl.load(parts + at, mask=mask, other=0.0) - mean[None, :]
        inside = tl.load(squares + at, mask=mask, other=0.0)
        total += tl.where(mask, inside + count * apart * apart, 0.0)
    tl.store(found + entry, mean, mask=entry < size)
    square = tl.sum(total, 0)
    if not SUMS:
        square = square / M
    tl.store(found + size + entry, square, mask=entry < size)


@triton.jit
def affine_kernel(
    x, map, residual, y, turns, K, period, splits, depth, programs,
    ACT: tl.constexpr, RESIDUAL: tl.constexpr, WAVE: tl.constexpr,
    V: tl.constexpr, ROWS: tl.constexpr, POSITIONS: tl.constexpr, CELLS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """activation(scale · (x − center) + shift + residual): one read of x (and residual), one
    write."""
    M = turns * V
    block, cell, position = _own_tile(K, splits, depth, programs, WAVE, CELLS)
    cell = cell * CELLS + tl.arange(0, CELLS)
    position = position * POSITIONS + tl.arange(0, POSITIONS)
    mask = (position < M)[:, None] & (cell < K)[None, :]
    at = _tile(block, cell, position, M, K, ROWS)
    entry = (block.to(tl.int64) * K + cell) % period
    value = tl.load(x + at, mask=mask, other=0.0)
    wait(OVERLAP)
    a = tl.load(map + entry, mask=cell < K, other=0.0)
    b = tl.load(map + period + entry, mask=cell < K, other=0.0)
    c = tl.load(map + 2 * period + entry, mask=cell < K, other=0.0)
    value = value.to(tl.float32) - c[None, :]
    value = value * a[None, :] + b[None, :]
    if RESIDUAL:
        value += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
    value = activate(value, ACT)
    tl.store(y + at, value.to(y.dtype.element_ty), mask=mask)


@triton.jit
def sums_kernel(
    dy, x, map, residual, kept, parts, turns, K, span, period,
    ACT: tl.constexpr, RESIDUAL: tl.constexpr, KEEP: tl.constexpr,
    V: tl.constexpr, ROWS: tl.constexpr, POSITIONS: tl.constexpr, CELLS: tl.constexpr,
    UNROLL: tl.constexpr, EVEN: tl.constexpr, WHOLE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Σ g·(x − center) and Σ g over ``span`` positions of each cell, g the gradient before the
    activation.

    One read of dy and x. The sign is recomputed from x, so nothing more is stored; g is written
    only where a residual needs it. Out: parts (2, splits, B, K).
    """
    M = turns * V
    split, block = tl.program_id(1), tl.program_id(2)
    cell = tl.program_id(0) * CELLS + tl.arange(0, CELLS)
    first = split * span
    last = tl.minimum(first + span, M)
    entry = (block.to(tl.int64) * K + cell) % period
    wait(OVERLAP)
    release(OVERLAP)
    c = tl.load(map + 2 * period + entry, mask=cell < K, other=0.0)
    if ACT != 0:
        a = tl.load(map + entry, mask=cell < K, other=0.0)
        b = tl.load(map + period + entry, mask=cell < K, other=0.0)
    da = tl.zeros((POSITIONS, CELLS), tl.float32)
    db = tl.zeros((POSITIONS, CELLS), tl.float32)
    for start in range(first, last, POSITIONS * UNROLL):
        position = start + tl.arange(0, POSITIONS * UNROLL)
        mask = _inside(position, last, cell, K, WHOLE)
        at = _tile(block, cell, position, M, K, ROWS)
        value = _read(x + at, mask, EVEN) - c[None, :]
        g = _read(dy + at, mask, EVEN)
        if ACT != 0:
            pre = value * a[None, :] + b[None, :]
            if RESIDUAL:
                pre += _read(residual + at, mask, EVEN)
            g = before(g, pre, ACT)
            if KEEP:
                tl.store(kept + at, g.to(kept.dtype.element_ty), mask=mask)
        da += _folded(g * value, UNROLL)
        db += _folded(g, UNROLL)
    out = (split * tl.num_programs(2) + block).to(tl.int64) * K + cell
    second = (tl.num_programs(1) * tl.num_programs(2)).to(tl.int64) * K
    tl.store(parts + out, tl.sum(da, 0), mask=cell < K)
    tl.store(parts + second + out, tl.sum(db, 0), mask=cell < K)


@triton.jit
def input_gradient_kernel(
    dy, x, map, residual, extra, dx, turns, K, period, splits, depth, programs,
    ACT: tl.constexpr, RESIDUAL: tl.constexpr, EXTRA: tl.constexpr, WAVE: tl.constexpr,
    V: tl.constexpr, ROWS: tl.constexpr, POSITIONS: tl.constexpr, CELLS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """scale · g + constant + slope · (x − center): one read of dy and x, one write."""
    M = turns * V
    block, cell, position = _own_tile(K, splits, depth, programs, WAVE, CELLS)
    cell = cell * CELLS + tl.arange(0, CELLS)
    position = position * POSITIONS + tl.arange(0, POSITIONS)
    mask = (position < M)[:, None] & (cell < K)[None, :]
    at = _tile(block, cell, position, M, K, ROWS)
    entry = (block.to(tl.int64) * K + cell) % period
    g = tl.load(dy + at, mask=mask, other=0.0)
    if ACT != 0 or EXTRA:
        value = tl.load(x + at, mask=mask, other=0.0)
    wait(OVERLAP)
    g = g.to(tl.float32)
    a = tl.load(map + entry, mask=cell < K, other=0.0)
    if ACT != 0 or EXTRA:
        c = tl.load(map + 2 * period + entry, mask=cell < K, other=0.0)
        value = value.to(tl.float32) - c[None, :]
    if ACT != 0:
        b = tl.load(map + period + entry, mask=cell < K, other=0.0)
        pre = value * a[None, :] + b[None, :]
        if RESIDUAL:
            pre += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
        g = before(g, pre, ACT)
    out = g * a[None, :]
    if EXTRA:
        constant = tl.load(extra + entry, mask=cell < K, other=0.0)
        slope = tl.load(extra + period + entry, mask=cell < K, other=0.0)
        out += value * slope[None, :] + constant[None, :]
    tl.store(dx + at, out.to(dx.dtype.element_ty), mask=mask)
