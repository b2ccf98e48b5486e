"""The four passes on Triton: the fast backend. Same functions as torch/passes.

The kernels come first, then what launches them.

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
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from normkit.core.layout import Layout
from normkit.engine.activations import NUMBERS
from normkit.engine.epilogue import AffineMap
from normkit.engine.replay.record import active
from normkit.engine.triton.activations import activate, before
from normkit.engine.triton.launch import Launch

# ---------------------------------------------------------------- kernels


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
def moments_kernel(
    x, parts, turns, K, span,
    V: tl.constexpr, ROWS: tl.constexpr, POSITIONS: tl.constexpr, CELLS: tl.constexpr,
):  # fmt: skip
    """Mean and sum of squares about it of ``span`` positions of each cell, one read of x.

    Every lane of the tile keeps its own mean and squares (Welford), and lanes are merged about
    their common mean once, at the end: nothing cancels, and no reduction stands in the loop. All
    values are taken less one, or the mean of four, so that a mean far from zero costs no digits.
    Out: parts (2, splits, B, K).
    """
    M = turns * V
    split, block = tl.program_id(1), tl.program_id(2)
    cell = tl.program_id(0) * CELLS + tl.arange(0, CELLS)
    lane = tl.arange(0, POSITIONS)
    first = split * span
    last = tl.minimum(first + span, M)
    near = tl.load(x + _one(block, cell, first, M, K, ROWS), mask=cell < K, other=0.0)
    near = near.to(tl.float32)
    if x.dtype.element_ty == tl.float32:  # narrower values have fewer digits than a sum keeps
        for quarter in tl.static_range(1, 4):
            some = first + (last - first) // 4 * quarter
            probe = tl.load(x + _one(block, cell, some, M, K, ROWS), mask=cell < K, other=0.0)
            near += probe
        near *= 0.25
    mean = tl.zeros((POSITIONS, CELLS), tl.float32)
    square = tl.zeros((POSITIONS, CELLS), tl.float32)
    seen = 0.0
    for start in range(first, last, POSITIONS):
        position = start + lane
        mask = (position < M)[:, None] & (cell < K)[None, :]
        at = _tile(block, cell, position, M, K, ROWS)
        value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32) - near[None, :]
        seen += 1.0
        apart = tl.where(mask, value - mean, 0.0)
        mean += apart * (1.0 / seen)
        square += apart * (value - mean)
    # how many values each lane has seen: the last lanes may have missed the last turn
    count = ((last - first - lane + POSITIONS - 1) // POSITIONS).to(tl.float32)[:, None]
    middle = tl.sum(count * mean, 0) / (last - first).to(tl.float32)
    apart = mean - middle[None, :]
    total = tl.sum(square + count * apart * apart, 0)
    out = (split * tl.num_programs(2) + block).to(tl.int64) * K + cell
    second = (tl.num_programs(1) * tl.num_programs(2)).to(tl.int64) * K
    tl.store(parts + out, near + middle, mask=cell < K)
    tl.store(parts + second + out, total, mask=cell < K)


@triton.jit
def rows_kernel(tables, out, begin, rows, size, DEPTH: tl.constexpr, WIDTH: tl.constexpr):
    """Sums over the rows of one table (rows, size) a program id of the second axis."""
    entry = (tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)).to(tl.int64)
    outer = tl.program_id(1).to(tl.int64)
    total = tl.zeros((DEPTH, WIDTH), tl.float32)
    for start in range(0, rows, DEPTH):
        row = start + tl.arange(0, DEPTH)
        mask = (row < rows)[:, None] & (entry < size)[None, :]
        at = begin + (outer * rows + row.to(tl.int64))[:, None] * size + entry[None, :]
        total += tl.load(tables + at, mask=mask, other=0.0)
    tl.store(out + outer * size + entry, tl.sum(total, 0), mask=entry < size)


@triton.jit
def merge_kernel(
    parts, found, M, size, splits, span,
    SUMS: tl.constexpr, DEPTH: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Moments of whole cells (2, size) from those of their splits (2, splits, size); with SUMS, not
    the variance but the sum of squares, so that they are parts of one split.

    First the common mean, then the squares about it: the tables are small and in the cache.
    """
    entry = (tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)).to(tl.int64)
    squares = parts + splits * size
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
    x, map, residual, y, turns, K, period,
    ACT: tl.constexpr, RESIDUAL: tl.constexpr,
    V: tl.constexpr, ROWS: tl.constexpr, POSITIONS: tl.constexpr, CELLS: tl.constexpr,
):  # fmt: skip
    """activation(scale · (x − center) + shift + residual): one read of x (and residual), one
    write."""
    M = turns * V
    block = tl.program_id(2)
    cell = tl.program_id(1) * CELLS + tl.arange(0, CELLS)
    position = tl.program_id(0) * POSITIONS + tl.arange(0, POSITIONS)
    mask = (position < M)[:, None] & (cell < K)[None, :]
    at = _tile(block, cell, position, M, K, ROWS)
    entry = (block.to(tl.int64) * K + cell) % period
    a = tl.load(map + entry, mask=cell < K, other=0.0)
    b = tl.load(map + period + entry, mask=cell < K, other=0.0)
    c = tl.load(map + 2 * period + entry, mask=cell < K, other=0.0)
    value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32) - c[None, :]
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
    c = tl.load(map + 2 * period + entry, mask=cell < K, other=0.0)
    if ACT != 0:
        a = tl.load(map + entry, mask=cell < K, other=0.0)
        b = tl.load(map + period + entry, mask=cell < K, other=0.0)
    da = tl.zeros((POSITIONS, CELLS), tl.float32)
    db = tl.zeros((POSITIONS, CELLS), tl.float32)
    for start in range(first, last, POSITIONS):
        position = start + tl.arange(0, POSITIONS)
        mask = (position < M)[:, None] & (cell < K)[None, :]
        at = _tile(block, cell, position, M, K, ROWS)
        value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32) - c[None, :]
        g = tl.load(dy + at, mask=mask, other=0.0).to(tl.float32)
        if ACT != 0:
            pre = value * a[None, :] + b[None, :]
            if RESIDUAL:
                pre += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
            g = before(g, pre, ACT)
            if KEEP:
                tl.store(kept + at, g.to(kept.dtype.element_ty), mask=mask)
        da += g * value
        db += g
    out = (split * tl.num_programs(2) + block).to(tl.int64) * K + cell
    second = (tl.num_programs(1) * tl.num_programs(2)).to(tl.int64) * K
    tl.store(parts + out, tl.sum(da, 0), mask=cell < K)
    tl.store(parts + second + out, tl.sum(db, 0), mask=cell < K)


@triton.jit
def input_gradient_kernel(
    dy, x, map, residual, extra, dx, turns, K, period,
    ACT: tl.constexpr, RESIDUAL: tl.constexpr, EXTRA: tl.constexpr,
    V: tl.constexpr, ROWS: tl.constexpr, POSITIONS: tl.constexpr, CELLS: tl.constexpr,
):  # fmt: skip
    """scale · g + constant + slope · (x − center): one read of dy and x, one write."""
    M = turns * V
    block = tl.program_id(2)
    cell = tl.program_id(1) * CELLS + tl.arange(0, CELLS)
    position = tl.program_id(0) * POSITIONS + tl.arange(0, POSITIONS)
    mask = (position < M)[:, None] & (cell < K)[None, :]
    at = _tile(block, cell, position, M, K, ROWS)
    entry = (block.to(tl.int64) * K + cell) % period
    a = tl.load(map + entry, mask=cell < K, other=0.0)
    g = tl.load(dy + at, mask=mask, other=0.0).to(tl.float32)
    if ACT != 0 or EXTRA:
        c = tl.load(map + 2 * period + entry, mask=cell < K, other=0.0)
        value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32) - c[None, :]
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


# ---------------------------------------------------------------- launches


TILE = 2048  # elements: two 16-byte loads of bfloat16 a thread; larger tiles spill the sums
PROGRAMS = 8  # for each multiprocessor, so that reductions of few cells fill the machine
GRID_LIMIT = 65_535  # of the second and third axis


class Form(NamedTuple):
    """How a kernel sees the tensor: B blocks of M positions × K cells, or R rows."""

    blocks: int
    positions: int
    cells: int
    rows: bool
    tile_positions: int
    tile_cells: int

    @property
    def tile(self) -> tuple[int, ...]:
        """What a kernel is compiled for: V, ROWS, POSITIONS, CELLS."""
        return self.shared, self.rows, self.tile_positions, self.tile_cells

    @property
    def shared(self) -> int:
        """The power of two, up to 16, that divides the positions."""
        return math.gcd(self.positions, 16)

    @property
    def turns(self) -> int:
        return self.positions // self.shared

    @property
    def cell_tiles(self) -> int:
        return -(-self.cells // self.tile_cells)

    @property
    def map_grid(self) -> tuple[int, int, int]:
        return -(-self.positions // self.tile_positions), self.cell_tiles, self.blocks


@lru_cache(maxsize=1024)
def form_of(shape: tuple[int, ...]) -> Form:
    """The form of a layout's view: (B, M, K), or (R, M) for rows."""
    if len(shape) == 2:
        cells, positions = shape
        wide = min(power_of_two(positions), 2048)
        return Form(1, positions, cells, True, wide, max(1, min(TILE // wide, power_of_two(cells))))
    blocks, positions, cells = shape
    wide = min(power_of_two(cells), 128)
    high = max(1, min(TILE // wide, power_of_two(positions)))
    return Form(blocks, positions, cells, False, high, wide)


@lru_cache(maxsize=1024)
def splits_of(form: Form, multiprocessors: int) -> tuple[int, int]:
    """Into how many parts each cell is cut for a reduction, and how long they are."""
    wanted = multiprocessors * PROGRAMS
    tiles = -(-form.positions // form.tile_positions)
    splits = max(1, min(tiles, wanted // max(1, form.cell_tiles * form.blocks)))
    span = -(-tiles // splits) * form.tile_positions
    return -(-form.positions // span), span


def serves(x: Tensor, layout: Layout) -> str:
    """Empty if these kernels can do it, else why not."""
    if not layout.splits:
        return "groups cut channels unevenly"
    return _serves(x.dtype, layout.extent)


@lru_cache(maxsize=4096)
def _serves(dtype: torch.dtype, extent: tuple[int, ...]) -> str:
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"the kernels do not compute in {dtype}"
    form = form_of(extent)
    if form.cell_tiles > GRID_LIMIT or form.blocks > GRID_LIMIT:
        return "more cells than a kernel's grid holds"
    return ""


# ---------------------------------------------------------------- moments


class Parts(NamedTuple):
    """Two tables of parts of cells, as one tensor."""

    tables: Tensor  # (2, splits, rows · columns)
    splits: int
    span: int  # positions in a part; the last may have fewer


def moment_parts(x: Tensor, layout: Layout) -> Parts:
    """Means and sums of squares about them: one read of x."""
    start, splits, span, size = _moments(layout.extent, _multiprocessors(x.device))
    parts = table(x, 2 * splits * size)
    start(layout.aligned(x), parts)
    return Parts(parts, splits, span)


@lru_cache(maxsize=4096)
def _moments(extent: tuple[int, ...], multiprocessors: int) -> tuple[Launch, int, int, int]:
    form = form_of(extent)
    splits, span = splits_of(form, multiprocessors)
    grid = form.cell_tiles, splits, form.blocks
    numbers = form.turns, form.cells, span
    start = Launch(moments_kernel, grid, numbers, form.tile)
    return start, splits, span, form.blocks * form.cells


def moments(x: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    found = merged(x, moment_parts(x, layout), layout, sums=False).tables.view(2, -1)
    return layout.lift(found[0]), layout.lift(found[1])


def merged(x: Tensor, parts: Parts, layout: Layout, *, sums: bool) -> Parts:
    """One part for each cell; its second table is the variance, or the sum of squares."""
    positions = form_of(layout.extent).positions
    size = parts.tables.numel() // (2 * parts.splits)
    found = table(x, 2 * size)
    _merge(positions, size, parts.splits, parts.span, sums)(parts.tables, found)
    return Parts(found, 1, positions)


@lru_cache(maxsize=4096)
def _merge(positions: int, size: int, splits: int, span: int, sums: bool) -> Launch:
    depth = min(power_of_two(splits), 64)
    width = max(8, 512 // depth)
    numbers = positions, size, splits, span
    return Launch(merge_kernel, (-(-size // width),), numbers, (sums, depth, width))


# ---------------------------------------------------------------- the map


def affine(x: Tensor, map: AffineMap, layout: Layout) -> Tensor:
    tables, period = _laid(layout, *map[:3])
    return apply_map(x, tables, period, map.residual, map.act, layout)


def apply_map(
    x: Tensor, tables: Tensor, period: int, residual: Tensor | None, act: str, layout: Layout
) -> Tensor:
    """The affine pass. ``tables`` begins with scale, shift and center, ``period`` entries each:
    those of all cells, or of one row that all samples share."""
    out = like(layout, x)
    start = _affine(layout.extent, period, act, residual is not None)
    start(layout.aligned(x), tables, _aligned(layout, residual), out)
    return out


@lru_cache(maxsize=4096)
def _affine(extent: tuple[int, ...], period: int, act: str, residual: bool) -> Launch:
    form = form_of(extent)
    constants = NUMBERS[act], residual, *form.tile
    return Launch(affine_kernel, form.map_grid, (form.turns, form.cells, period), constants)


# ---------------------------------------------------------------- the way back


def sums(
    grad: Tensor, x: Tensor, map: AffineMap, layout: Layout, grad_residual: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    tables, period = _laid(layout, *map[:3])
    parts, kept = sum_parts(grad, x, tables, period, map.residual, map.act, layout, grad_residual)
    da, db = summed(parts).tables.view(2, -1)
    return layout.lift(da), layout.lift(db), kept


def summed(parts: Parts) -> Parts:
    """One part for each cell."""
    if parts.splits == 1:
        return parts
    return Parts(summed_rows(parts.tables, 0, 2, parts.splits), 1, parts.span)


def summed_rows(tables: Tensor, begin: int, outer: int, rows: int) -> Tensor:
    """Σ over the rows of tables (outer, rows, size) that begin somewhere in a tensor."""
    size = (tables.numel() - begin) // (outer * rows)
    out = table(tables, outer * size)
    _rows(begin, outer, rows, size)(tables, out)
    return out


@lru_cache(maxsize=4096)
def _rows(begin: int, outer: int, rows: int, size: int) -> Launch:
    depth = min(power_of_two(rows), 32)
    width = max(8, min(power_of_two(size), 1024 // depth))
    return Launch(rows_kernel, (-(-size // width), outer), (begin, rows, size), (depth, width))


def sum_parts(
    grad: Tensor,
    x: Tensor,
    tables: Tensor,
    period: int,
    residual: Tensor | None,
    act: str,
    layout: Layout,
    grad_residual: bool,
) -> tuple[Parts, Tensor | None]:
    """Parts of Σ g·(x − center) and Σ g, and g where a residual needs it: one read of grad and
    x."""
    keep = like(layout, x) if grad_residual and act != "none" else None
    start, splits, span, size = _sums(
        layout.extent,
        _multiprocessors(x.device),
        period,
        act,
        residual is not None,
        keep is not None,
    )
    parts = table(x, 2 * splits * size)
    start(layout.aligned(grad), layout.aligned(x), tables, _aligned(layout, residual), keep, parts)
    kept = grad if grad_residual and act == "none" else keep
    return Parts(parts, splits, span), kept


@lru_cache(maxsize=4096)
def _sums(
    extent: tuple[int, ...],
    multiprocessors: int,
    period: int,
    act: str,
    residual: bool,
    keep: bool,
) -> tuple[Launch, int, int, int]:
    form = form_of(extent)
    splits, span = splits_of(form, multiprocessors)
    grid = form.cell_tiles, splits, form.blocks
    numbers = form.turns, form.cells, span, period
    constants = NUMBERS[act], residual, keep, *form.tile
    start = Launch(sums_kernel, grid, numbers, constants)
    return start, splits, span, form.blocks * form.cells


def input_gradient(
    grad: Tensor,
    x: Tensor,
    map: AffineMap,
    constant: Tensor | None,
    slope: Tensor | None,
    layout: Layout,
) -> Tensor:
    tables, period = _laid(layout, *map[:3])
    extra = None
    if constant is not None or slope is not None:
        extra, _ = _laid(layout, constant, slope)
    return apply_gradient(grad, x, tables, period, map.residual, map.act, extra, layout)


def apply_gradient(
    grad: Tensor,
    x: Tensor,
    tables: Tensor,
    period: int,
    residual: Tensor | None,
    act: str,
    extra: Tensor | None,
    layout: Layout,
) -> Tensor:
    """The pass that writes dx; ``extra`` begins with constant and slope, tables like the map's."""
    out = like(layout, x)
    start = _gradient(layout.extent, period, act, residual is not None, extra is not None)
    start(layout.aligned(grad), layout.aligned(x), tables, _aligned(layout, residual), extra, out)
    return out


@lru_cache(maxsize=4096)
def _gradient(
    extent: tuple[int, ...], period: int, act: str, residual: bool, extra: bool
) -> Launch:
    form = form_of(extent)
    numbers = form.turns, form.cells, period
    constants = NUMBERS[act], residual, extra, *form.tile
    return Launch(input_gradient_kernel, form.map_grid, numbers, constants)


# ---------------------------------------------------------------- small things


def _aligned(layout: Layout, residual: Tensor | None) -> Tensor | None:
    return None if residual is None else layout.aligned(residual)


def _laid(layout: Layout, *tables: Tensor | None) -> tuple[Tensor, int]:
    """Tables in the order of the view's cells, dense float32, one after the other; their size."""
    laid = [None if t is None else layout.lay(t).reshape(-1).to(torch.float32) for t in tables]
    some = next(t for t in laid if t is not None)
    zero = torch.zeros_like(some) if any(t is None for t in laid) else some
    return torch.stack([zero if t is None else t for t in laid]), some.shape[0]


def table(x: Tensor, size: int) -> Tensor:
    """An empty float32 table beside x."""
    made = torch.empty(size, dtype=torch.float32, device=x.device)
    if active.recording is not None:
        active.recording.allocated(made, like_x=False)
    return made


def like(layout: Layout, x: Tensor) -> Tensor:
    """An empty tensor of x's type, in the format of the layout."""
    made = layout.like(x)
    if active.recording is not None:
        active.recording.allocated(made, like_x=True)
    return made


def power_of_two(value: int) -> int:
    """The least power of two that is not below a value."""
    return 1 << max(0, value - 1).bit_length()


@lru_cache(maxsize=16)
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1  # Triton's interpreter
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
