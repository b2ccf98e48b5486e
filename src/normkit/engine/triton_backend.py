"""The four passes on Triton: the fast backend. Same functions as torch_backend."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from normkit.core.layout import Layout
from normkit.engine import triton_kernels as kernels
from normkit.engine.launch import launch

ACTIVATION = {"none": 0, "relu": 1, "silu": 2}
TILE = 2048  # elements: two 16-byte loads of bfloat16 a thread; larger tiles spill the sums
PROGRAMS = 8  # for each multiprocessor, so that reductions of few cells fill the machine
WARPS = 4
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
    def options(self) -> dict[str, int | bool]:
        return {
            "ROWS": self.rows,
            "POSITIONS": self.tile_positions,
            "CELLS": self.tile_cells,
            "num_warps": WARPS,
        }

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
    view = layout.view(x).shape if x.numel() else (1, 1)
    form = form_of(tuple(view))
    if form.cell_tiles > GRID_LIMIT or form.blocks > GRID_LIMIT:
        return "more cells than a kernel's grid holds"
    return ""


class Parts(NamedTuple):
    """Two tables of parts of cells, (splits, rows · columns) each, as one tensor."""

    tables: Tensor  # (2, splits, entries)
    splits: int
    span: int  # positions in a part; the last may have fewer


def moment_parts(x: Tensor, layout: Layout) -> Parts:
    """Means and sums of squares about them: one read of x."""
    cells = layout.view(x)
    form = form_of(tuple(cells.shape))
    splits, span = splits_of(form, _multiprocessors(x.device))
    parts = x.new_empty((2, splits, form.blocks * form.cells), dtype=torch.float32)
    launch(
        kernels.moments_kernel,
        (form.cell_tiles, splits, form.blocks),
        cells,
        parts[0],
        parts[1],
        form.positions,
        form.cells,
        span,
        **form.options,
    )
    return Parts(parts, splits, span)


def moments(x: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    parts, splits, span = moment_parts(x, layout)
    size = parts.shape[2]
    found = x.new_empty((2, size), dtype=torch.float32)
    depth = min(power_of_two(splits), 64)
    width = max(8, 512 // depth)
    positions = form_of(tuple(layout.view(x).shape)).positions
    launch(
        kernels.merge_kernel,
        (-(-size // width),),
        parts[0],
        parts[1],
        found[0],
        found[1],
        positions,
        size,
        splits,
        span,
        DEPTH=depth,
        WIDTH=width,
    )
    return layout.lift(found[0]), layout.lift(found[1])


def affine(
    x: Tensor, scale: Tensor, shift: Tensor, residual: Tensor | None, act: str, layout: Layout
) -> Tensor:
    return apply_map(x, _laid(scale, layout), _laid(shift, layout), residual, act, layout)


def apply_map(
    x: Tensor, a: Tensor, b: Tensor, residual: Tensor | None, act: str, layout: Layout
) -> Tensor:
    """The affine pass with laid tables, which may be of one row that all samples share."""
    out = layout.like(x)
    cells = layout.view(x)
    form = form_of(tuple(cells.shape))
    rest = cells if residual is None else layout.view(residual)
    launch(
        kernels.affine_kernel,
        form.map_grid,
        cells,
        a,
        b,
        rest,
        layout.view(out),
        form.positions,
        form.cells,
        a.numel(),
        ACT=ACTIVATION[act],
        RESIDUAL=residual is not None,
        **form.options,
    )
    return out


def sums(
    grad: Tensor,
    x: Tensor,
    scale: Tensor,
    shift: Tensor,
    residual: Tensor | None,
    act: str,
    layout: Layout,
    grad_residual: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    a, b = _laid(scale, layout), _laid(shift, layout)
    parts, kept = sum_parts(grad, x, a, b, residual, act, layout, grad_residual)
    da, db = parts.tables.sum(1) if parts.splits > 1 else parts.tables[:, 0]
    return layout.lift(da), layout.lift(db), kept


def sum_parts(
    grad: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    residual: Tensor | None,
    act: str,
    layout: Layout,
    grad_residual: bool,
) -> tuple[Parts, Tensor | None]:
    """Parts of Σ g·x and Σ g, and g where a residual needs it: one read of grad and x."""
    cells = layout.view(x)
    form = form_of(tuple(cells.shape))
    splits, span = splits_of(form, _multiprocessors(x.device))
    keep = layout.like(x) if grad_residual and act != "none" else None
    parts = x.new_empty((2, splits, form.blocks * form.cells), dtype=torch.float32)
    launch(
        kernels.sums_kernel,
        (form.cell_tiles, splits, form.blocks),
        layout.view(grad),
        cells,
        a,
        b,
        cells if residual is None else layout.view(residual),
        cells if keep is None else layout.view(keep),
        parts[0],
        parts[1],
        form.positions,
        form.cells,
        span,
        a.numel(),
        ACT=ACTIVATION[act],
        RESIDUAL=residual is not None,
        KEEP=keep is not None,
        **form.options,
    )
    kept = grad if grad_residual and act == "none" else keep
    return Parts(parts, splits, span), kept


def input_gradient(
    grad: Tensor,
    x: Tensor,
    scale: Tensor,
    shift: Tensor,
    residual: Tensor | None,
    act: str,
    constant: Tensor | None,
    slope: Tensor | None,
    layout: Layout,
) -> Tensor:
    a, b = _laid(scale, layout), _laid(shift, layout)
    c0, c1 = (None if t is None else _laid(t, layout) for t in (constant, slope))
    return apply_gradient(grad, x, a, b, residual, act, c0, c1, layout)


def apply_gradient(
    grad: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    residual: Tensor | None,
    act: str,
    constant: Tensor | None,
    slope: Tensor | None,
    layout: Layout,
) -> Tensor:
    """The pass that writes dx, with laid tables, all of the same size."""
    out = layout.like(x)
    cells = layout.view(x)
    form = form_of(tuple(cells.shape))
    launch(
        kernels.input_gradient_kernel,
        form.map_grid,
        layout.view(grad),
        cells,
        a,
        b,
        cells if residual is None else layout.view(residual),
        a if constant is None else constant,
        a if slope is None else slope,
        layout.view(out),
        form.positions,
        form.cells,
        a.numel(),
        ACT=ACTIVATION[act],
        RESIDUAL=residual is not None,
        CONSTANT=constant is not None,
        SLOPE=slope is not None,
        **form.options,
    )
    return out


def _laid(table: Tensor, layout: Layout) -> Tensor:
    """A table in the order of the view's cells, dense float32."""
    return layout.lay(table).contiguous().to(torch.float32)


def power_of_two(value: int) -> int:
    """The least power of two that is not below a value."""
    return 1 << max(0, value - 1).bit_length()


@lru_cache(maxsize=16)
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1  # Triton's interpreter
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
