"""The four passes on Triton: the fast backend. Same functions as torch/passes.

What the kernels compute stands in kernels.py, how they see a tensor in forms.py.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from normkit.core.layout import Layout
from normkit.engine.activations import NUMBERS
from normkit.engine.epilogue import AffineMap
from normkit.engine.replay.record import active
from normkit.engine.triton.flat import (
    flat_affine_kernel,
    flat_gradient_kernel,
    flat_moments_kernel,
    flat_sums_kernel,
)
from normkit.engine.triton.forms import (
    FLAT_WARPS,
    GRID_LIMIT,
    Form,
    form_of,
    power_of_two,
    reduction_of,
    sweep_of,
)
from normkit.engine.triton.forms import multiprocessors as _multiprocessors
from normkit.engine.triton.kernels import (
    affine_kernel,
    input_gradient_kernel,
    merge_kernel,
    moments_kernel,
    rows_kernel,
    sums_kernel,
)
from normkit.engine.triton.launch import Launch


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
    start, splits, span, size = _moments(
        layout.extent, _multiprocessors(x.device), x.element_size()
    )
    parts = table(x, 2 * splits * size)
    start(layout.aligned(x), parts)
    return Parts(parts, splits, span)


@lru_cache(maxsize=4096)
def _moments(
    extent: tuple[int, ...], multiprocessors: int, bytes: int
) -> tuple[Launch, int, int, int]:
    form = form_of(extent)
    if form.flat:
        start = Launch(flat_moments_kernel, *_flat(form, form.cells))
        return start, 1, form.positions, form.cells
    reduction = reduction_of(form, multiprocessors)
    numbers = form.turns, form.cells, reduction.span
    start = Launch(moments_kernel, reduction.grid(form), numbers, reduction.tile(form, bytes))
    return start, reduction.splits, reduction.span, form.blocks * form.cells


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
    grid = (-(-size // width),)
    return Launch(merge_kernel, grid, numbers, (sums, depth, width))


# ---------------------------------------------------------------- the map


def affine(x: Tensor, map: AffineMap, layout: Layout) -> Tensor:
    tables, period = _laid(layout, *map[:3])
    return apply_map(x, tables, period, map.residual, map.act, layout)


def apply_map(
    x: Tensor,
    tables: Tensor,
    period: int,
    residual: Tensor | None,
    act: str,
    layout: Layout,
    *,
    reduced: bool = False,
) -> Tensor:
    """The affine pass. ``tables`` begins with scale, shift and center, ``period`` entries each:
    those of all cells, or of one row that all samples share. With ``reduced``, only kernels from
    here were started since the reduction of x, and this one may read x before they have ended."""
    out = like(layout, x)
    given = layout.aligned(x)
    start = _affine(
        layout.extent,
        _multiprocessors(x.device),
        period,
        act,
        residual is not None,
        reduced and given is x,
    )
    start(given, tables, _aligned(layout, residual), out)
    return out


@lru_cache(maxsize=4096)
def _affine(
    extent: tuple[int, ...],
    multiprocessors: int,
    period: int,
    act: str,
    residual: bool,
    reduced: bool,
) -> Launch:
    form = form_of(extent)
    if form.flat:
        start = _flat(form, period, NUMBERS[act], residual)
        return Launch(flat_affine_kernel, *start, alone=not reduced)
    sweep = sweep_of(form, multiprocessors)
    numbers = form.turns, form.cells, period, *sweep[:3]
    constants = NUMBERS[act], residual, sweep.wave, *form.tile
    return Launch(affine_kernel, (sweep.tiles,), numbers, constants, alone=not reduced)


def _flat(form: Form, period: int, *constants: int) -> tuple[Any, ...]:
    """Grid, numbers, constants and warps of a kernel for short rows."""
    assert form.flat is not None
    return (form.cells // form.flat[1],), (period,), (*constants, *form.flat), FLAT_WARPS


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
    grid, numbers = (-(-size // width), outer), (begin, rows, size)
    return Launch(rows_kernel, grid, numbers, (depth, width))


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
        x.element_size(),
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
    bytes: int,
    period: int,
    act: str,
    residual: bool,
    keep: bool,
) -> tuple[Launch, int, int, int]:
    form = form_of(extent)
    if form.flat:
        start = Launch(flat_sums_kernel, *_flat(form, period, NUMBERS[act], residual, keep))
        return start, 1, form.positions, form.cells
    reduction = reduction_of(form, multiprocessors)
    numbers = form.turns, form.cells, reduction.span, period
    constants = NUMBERS[act], residual, keep, *reduction.tile(form, bytes)
    start = Launch(sums_kernel, reduction.grid(form), numbers, constants)
    return start, reduction.splits, reduction.span, form.blocks * form.cells


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
    *,
    reduced: bool = False,
) -> Tensor:
    """The pass that writes dx; ``extra`` begins with constant and slope, tables like the map's.
    ``reduced``: as in ``apply_map``, of grad and x."""
    out = like(layout, x)
    given = layout.aligned(grad), layout.aligned(x)
    start = _gradient(
        layout.extent,
        _multiprocessors(x.device),
        period,
        act,
        residual is not None,
        extra is not None,
        reduced and given[0] is grad and given[1] is x,
    )
    start(*given, tables, _aligned(layout, residual), extra, out)
    return out


@lru_cache(maxsize=4096)
def _gradient(
    extent: tuple[int, ...],
    multiprocessors: int,
    period: int,
    act: str,
    residual: bool,
    extra: bool,
    reduced: bool,
) -> Launch:
    form = form_of(extent)
    if form.flat:
        start = _flat(form, period, NUMBERS[act], residual, extra)
        return Launch(flat_gradient_kernel, *start, alone=not reduced)
    sweep = sweep_of(form, multiprocessors)
    numbers = form.turns, form.cells, period, *sweep[:3]
    constants = NUMBERS[act], residual, extra, sweep.wave, *form.tile
    return Launch(input_gradient_kernel, (sweep.tiles,), numbers, constants, alone=not reduced)


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
