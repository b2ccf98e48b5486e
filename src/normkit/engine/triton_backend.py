"""The four passes on Triton: the fast backend. Same functions as torch_backend."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from normkit.core.layout import Layout
from normkit.engine import triton_kernels as kernels
from normkit.engine.epilogue import AffineMap
from normkit.engine.launch import Launch

ACTIVATION = {"none": 0, "relu": 1, "silu": 2}
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
    start = Launch(kernels.moments_kernel, grid, numbers, form.tile)
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
    return Launch(kernels.merge_kernel, (-(-size // width),), numbers, (sums, depth, width))


# ---------------------------------------------------------------- the map


def affine(x: Tensor, map: AffineMap, layout: Layout) -> Tensor:
    tables, period = _laid(layout, map.scale, map.shift)
    return apply_map(x, tables, period, map.residual, map.act, layout)


def apply_map(
    x: Tensor, tables: Tensor, period: int, residual: Tensor | None, act: str, layout: Layout
) -> Tensor:
    """The affine pass. ``tables`` begins with scale and shift, ``period`` entries each: those of
    all cells, or of one row that all samples share."""
    out = layout.like(x)
    start = _affine(layout.extent, period, act, residual is not None)
    start(layout.aligned(x), tables, _aligned(layout, residual), out)
    return out


@lru_cache(maxsize=4096)
def _affine(extent: tuple[int, ...], period: int, act: str, residual: bool) -> Launch:
    form = form_of(extent)
    constants = ACTIVATION[act], residual, *form.tile
    return Launch(kernels.affine_kernel, form.map_grid, (form.turns, form.cells, period), constants)


# ---------------------------------------------------------------- the way back


def sums(
    grad: Tensor, x: Tensor, map: AffineMap, layout: Layout, grad_residual: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    tables, period = _laid(layout, map.scale, map.shift)
    parts, kept = sum_parts(grad, x, tables, period, map.residual, map.act, layout, grad_residual)
    da, db = summed(parts).tables.view(2, -1)
    return layout.lift(da), layout.lift(db), kept


def summed(parts: Parts) -> Parts:
    """One part for each cell."""
    if parts.splits == 1:
        return parts
    return Parts(parts.tables.view(2, parts.splits, -1).sum(1), 1, parts.span)


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
    """Parts of Σ g·x and Σ g, and g where a residual needs it: one read of grad and x."""
    keep = layout.like(x) if grad_residual and act != "none" else None
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
    constants = ACTIVATION[act], residual, keep, *form.tile
    start = Launch(kernels.sums_kernel, grid, numbers, constants)
    return start, splits, span, form.blocks * form.cells


def input_gradient(
    grad: Tensor,
    x: Tensor,
    map: AffineMap,
    constant: Tensor | None,
    slope: Tensor | None,
    layout: Layout,
) -> Tensor:
    tables, period = _laid(layout, map.scale, map.shift)
    extra = None
    if constant is not None or slope is not None:
        zero = torch.zeros_like(map.scale)
        extra, _ = _laid(layout, *(zero if t is None else t for t in (constant, slope)))
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
    out = layout.like(x)
    start = _gradient(layout.extent, period, act, residual is not None, extra is not None)
    start(layout.aligned(grad), layout.aligned(x), tables, _aligned(layout, residual), extra, out)
    return out


@lru_cache(maxsize=4096)
def _gradient(
    extent: tuple[int, ...], period: int, act: str, residual: bool, extra: bool
) -> Launch:
    form = form_of(extent)
    numbers = form.turns, form.cells, period
    constants = ACTIVATION[act], residual, extra, *form.tile
    return Launch(kernels.input_gradient_kernel, form.map_grid, numbers, constants)


# ---------------------------------------------------------------- small things


def _aligned(layout: Layout, residual: Tensor | None) -> Tensor | None:
    return None if residual is None else layout.aligned(residual)


def _laid(layout: Layout, *tables: Tensor) -> tuple[Tensor, int]:
    """Tables in the order of the view's cells, dense float32, one after the other; their size."""
    laid = torch.stack([layout.lay(t).reshape(-1).to(torch.float32) for t in tables])
    return laid, laid.shape[1]


def table(x: Tensor, size: int) -> Tensor:
    """An empty float32 table beside x."""
    return torch.empty(size, dtype=torch.float32, device=x.device)


def power_of_two(value: int) -> int:
    """The least power of two that is not below a value."""
    return 1 << max(0, value - 1).bit_length()


@lru_cache(maxsize=16)
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1  # Triton's interpreter
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
