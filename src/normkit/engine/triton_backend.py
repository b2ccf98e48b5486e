"""The four passes on Triton: the fast backend. Same functions as torch_backend."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from normkit.core.layout import Layout
from normkit.engine import triton_kernels as kernels
from normkit.engine.epilogue import AffineMap
from normkit.engine.launch import launch

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
        """What a kernel is compiled for: ROWS, POSITIONS, CELLS."""
        return self.rows, self.tile_positions, self.tile_cells

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
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"the kernels do not compute in {x.dtype}"
    form = form_of(layout.extent)
    if form.cell_tiles > GRID_LIMIT or form.blocks > GRID_LIMIT:
        return "more cells than a kernel's grid holds"
    return ""


class Parts(NamedTuple):
    """Two tables of parts of cells, as one tensor."""

    tables: Tensor  # (2, splits, rows · columns)
    splits: int
    span: int  # positions in a part; the last may have fewer


def moment_parts(x: Tensor, layout: Layout) -> Parts:
    """Means and sums of squares about them: one read of x."""
    form = form_of(layout.extent)
    splits, span = splits_of(form, _multiprocessors(x.device))
    parts = table(x, 2, splits, form.blocks * form.cells)
    launch(
        kernels.moments_kernel,
        (form.cell_tiles, splits, form.blocks),
        (layout.aligned(x), parts),
        (form.positions, form.cells, span),
        form.tile,
    )
    return Parts(parts, splits, span)


def moments(x: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    parts, splits, span = moment_parts(x, layout)
    size = parts.shape[2]
    found = table(x, 2, size)
    depth = min(power_of_two(splits), 64)
    width = max(8, 512 // depth)
    launch(
        kernels.merge_kernel,
        (-(-size // width),),
        (parts, found),
        (form_of(layout.extent).positions, size, splits, span),
        (depth, width),
    )
    return layout.lift(found[0]), layout.lift(found[1])


def affine(x: Tensor, map: AffineMap, layout: Layout) -> Tensor:
    return apply_map(x, _laid(layout, map.scale, map.shift), map.residual, map.act, layout)


def apply_map(
    x: Tensor, tables: Tensor, residual: Tensor | None, act: str, layout: Layout
) -> Tensor:
    """The affine pass; the map's tables may be of one row that all samples share."""
    out = layout.like(x)
    form = form_of(layout.extent)
    launch(
        kernels.affine_kernel,
        form.map_grid,
        (layout.aligned(x), tables, _aligned(layout, residual), out),
        (form.positions, form.cells, tables.shape[1]),
        (ACTIVATION[act], residual is not None, *form.tile),
    )
    return out


def sums(
    grad: Tensor, x: Tensor, map: AffineMap, layout: Layout, grad_residual: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    tables = _laid(layout, map.scale, map.shift)
    parts, kept = sum_parts(grad, x, tables, map.residual, map.act, layout, grad_residual)
    da, db = parts.tables.sum(1) if parts.splits > 1 else parts.tables[:, 0]
    return layout.lift(da), layout.lift(db), kept


def sum_parts(
    grad: Tensor,
    x: Tensor,
    tables: Tensor,
    residual: Tensor | None,
    act: str,
    layout: Layout,
    grad_residual: bool,
) -> tuple[Parts, Tensor | None]:
    """Parts of Σ g·x and Σ g, and g where a residual needs it: one read of grad and x."""
    form = form_of(layout.extent)
    splits, span = splits_of(form, _multiprocessors(x.device))
    keep = layout.like(x) if grad_residual and act != "none" else None
    parts = table(x, 2, splits, form.blocks * form.cells)
    launch(
        kernels.sums_kernel,
        (form.cell_tiles, splits, form.blocks),
        (layout.aligned(grad), layout.aligned(x), tables, _aligned(layout, residual), keep, parts),
        (form.positions, form.cells, span, tables.shape[1]),
        (ACTIVATION[act], residual is not None, keep is not None, *form.tile),
    )
    kept = grad if grad_residual and act == "none" else keep
    return Parts(parts, splits, span), kept


def input_gradient(
    grad: Tensor,
    x: Tensor,
    map: AffineMap,
    constant: Tensor | None,
    slope: Tensor | None,
    layout: Layout,
) -> Tensor:
    tables, extra = _laid(layout, map.scale, map.shift), None
    if constant is not None or slope is not None:
        zero = torch.zeros_like(map.scale)
        extra = _laid(layout, *(zero if t is None else t for t in (constant, slope)))
    return apply_gradient(grad, x, tables, map.residual, map.act, extra, layout)


def apply_gradient(
    grad: Tensor,
    x: Tensor,
    tables: Tensor,
    residual: Tensor | None,
    act: str,
    extra: Tensor | None,
    layout: Layout,
) -> Tensor:
    """The pass that writes dx; ``extra`` holds constant and slope, tables of the map's size."""
    out = layout.like(x)
    form = form_of(layout.extent)
    launch(
        kernels.input_gradient_kernel,
        form.map_grid,
        (layout.aligned(grad), layout.aligned(x), tables, _aligned(layout, residual), extra, out),
        (form.positions, form.cells, tables.shape[1]),
        (ACTIVATION[act], residual is not None, extra is not None, *form.tile),
    )
    return out


def _aligned(layout: Layout, residual: Tensor | None) -> Tensor | None:
    return None if residual is None else layout.aligned(residual)


def _laid(layout: Layout, *tables: Tensor) -> Tensor:
    """Tables in the order of the view's cells, dense float32, one after the other."""
    return torch.stack([layout.lay(t).reshape(-1).to(torch.float32) for t in tables])


def table(x: Tensor, *size: int) -> Tensor:
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
