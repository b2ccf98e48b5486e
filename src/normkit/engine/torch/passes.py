"""The four passes over activations in plain torch: any device, the reference of all backends.

On a CPU the tensor is worked through in tiles that stay in the cache, so each pass reads memory
once although it takes several torch calls. Elsewhere a tile is the whole tensor.

Two passes of whole channels have a fused CPU kernel in torch: batch norm's own kernels reduce over
a batch whose channels run fastest in memory in one call, where torch's general reductions take
three. The input is shown to them as a channels_last image.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from normkit.core.layout import Batch, Layout
from normkit.core.precision import statistics_dtype
from normkit.engine.epilogue import AffineMap, before, epilogue_

aten = torch.ops.aten

TILE = 1 << 20  # elements: 4 MB of float32, where a few calls a tile cost less than memory


class Tile(NamedTuple):
    """A part of the view, and the part of a laid table that belongs to it."""

    cells: Any
    table: slice


def moments(x: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of each cell, tables (N, K): one read of x."""
    cells = layout.view(x)
    if isinstance(layout, Batch) and has_native(x):
        mean, var = native_moments(cells)
        return layout.lift(mean), layout.lift(var)
    dtype = statistics_dtype(x.dtype)
    tiles = list(_tiles(cells, layout))
    if len(tiles) > 1 and cells.shape[0] == 1:
        return _moments_of_one_row(cells, layout, tiles, dtype)
    means, variances = [], []
    scratch = None
    for tile in tiles:
        part = cells[tile.cells].to(dtype)
        mean = layout.mean(part)
        scratch = _squared_difference(part, layout.over(mean), _reuse(scratch, part))
        means.append(mean)
        variances.append(layout.mean(scratch))
    return layout.lift(torch.cat(means)), layout.lift(torch.cat(variances))


def affine(x: Tensor, map: AffineMap, layout: Layout) -> Tensor:
    """activation(scale · x + shift + residual): one read of x (and residual), one write."""
    out = layout.like(x)
    cells, result = layout.view(x), layout.view(out)
    a, b = layout.lay(map.scale), layout.lay(map.shift)
    rest = None if map.residual is None else layout.view(map.residual)
    for tile, table in _tiles(cells, layout):
        direct = result[tile] if x.dtype == a.dtype else None
        part = cells[tile].to(a.dtype)
        y = _mapped(part, layout.over(a[table]), layout.over(b[table]), direct)
        epilogue_(y, None if rest is None else rest[tile], map.act)
        if direct is None:
            result[tile] = y
    return out


def sums(
    grad: Tensor, x: Tensor, map: AffineMap, layout: Layout, grad_residual: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Σ g·x and Σ g of each cell, g the gradient before the activation; and g if asked for.

    One read of grad and x. The sign of what went into the activation is recomputed, not stored.
    """
    cells, dy = layout.view(x), layout.view(grad)
    if isinstance(layout, Batch) and has_native(x) and map.act == "none":
        da, db = native_sums(dy, cells)
        return layout.lift(da), layout.lift(db), grad if grad_residual else None
    a, b = layout.lay(map.scale), layout.lay(map.shift)
    rest = None if map.residual is None else layout.view(map.residual)
    keep = layout.like(x) if grad_residual and map.act != "none" else None
    kept = None if keep is None else layout.view(keep)
    scales, shifts = [], []
    scratch = None
    for tile, table in _tiles(cells, layout):
        part = cells[tile].to(a.dtype)
        between = None if rest is None else rest[tile]
        g = _before(dy[tile].to(a.dtype), part, a[table], b[table], between, map.act, layout)
        scratch = torch.mul(g, part, out=_reuse(scratch, part))
        scales.append(layout.sum(scratch))
        shifts.append(layout.sum(g))
        if kept is not None:
            kept[tile] = g
    grad_of_residual = grad if grad_residual and map.act == "none" else keep
    one_row = cells.shape[0] == 1
    da, db = (sum(t[1:], t[0]) if one_row else torch.cat(t) for t in (scales, shifts))
    return layout.lift(da), layout.lift(db), grad_of_residual


def input_gradient(
    grad: Tensor,
    x: Tensor,
    map: AffineMap,
    constant: Tensor | None,
    slope: Tensor | None,
    layout: Layout,
) -> Tensor:
    """scale · g + constant + slope · x: one read of grad and x, one write."""
    out = layout.like(x)
    cells, dy, result = layout.view(x), layout.view(grad), layout.view(out)
    a, b = layout.lay(map.scale), layout.lay(map.shift)
    rest = None if map.residual is None else layout.view(map.residual)
    c0 = None if constant is None else layout.lay(constant)
    c1 = None if slope is None else layout.lay(slope)
    for tile, table in _tiles(cells, layout):
        part = cells[tile].to(a.dtype)
        between = None if rest is None else rest[tile]
        g = _before(dy[tile].to(a.dtype), part, a[table], b[table], between, map.act, layout)
        direct = result[tile] if x.dtype == a.dtype else None
        added = None if c0 is None else layout.over(c0[table])
        dx = _mapped(g, layout.over(a[table]), added, direct)
        if c1 is not None:
            dx.addcmul_(part, layout.over(c1[table]))
        if direct is None:
            result[tile] = dx
    return out


def _moments_of_one_row(
    cells: Tensor, layout: Layout, tiles: list[Tile], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cells that are longer than a tile: the mean first, then the squares about it."""
    parts = [cells[tile.cells] for tile in tiles]
    mean = torch.stack([layout.sum(part.to(dtype)) for part in parts]).sum(0) / layout.count
    over = layout.over(mean)
    squares = [layout.sum(_squared_difference(part.to(dtype), over, None)) for part in parts]
    return layout.lift(mean), layout.lift(torch.stack(squares).sum(0) / layout.count)


def _before(
    g: Tensor, part: Tensor, a: Tensor, b: Tensor, residual: Tensor | None, act: str, layout: Layout
) -> Tensor:
    """The gradient before the activation."""
    if act == "none":
        return g
    pre = _mapped(part, layout.over(a), layout.over(b), None)
    if residual is not None:
        pre += residual
    return before(g, pre, act)


def _mapped(part: Tensor, a: Tensor, b: Tensor | None, out: Tensor | None) -> Tensor:
    """a · part + b. One call is faster where the tables run along memory, two where they do not."""
    if b is None:
        return torch.mul(part, a, out=out)
    if a.shape[-1] > 1:
        return torch.addcmul(b, part, a, out=out)
    return torch.mul(part, a, out=out).add_(b)


def _squared_difference(part: Tensor, mean: Tensor, out: Tensor | None) -> Tensor:
    """(part − mean)² in one call: what torch calls the loss is just this before it is summed."""
    if out is None:
        return aten.mse_loss(part, mean, 0)
    return aten.mse_loss.out(part, mean, 0, out=out)


def _reuse(scratch: Tensor | None, part: Tensor) -> Tensor | None:
    """The memory of the last tile, already in the cache, if this one has its shape."""
    if scratch is None or scratch.shape[1:] != part.shape[1:]:
        return None
    return scratch[: part.shape[0]]


def _tiles(cells: Tensor, layout: Layout) -> Iterator[Tile]:
    """Cuts the view along its rows, or along its cells if there is but one row of them."""
    rows = cells.shape[0]
    along = rows > 1 or not layout.splits
    length = rows if along else cells.shape[1]
    step = length
    if cells.device.type == "cpu" and cells.numel() > TILE:
        step = max(1, TILE * length // cells.numel())
    for start in range(0, length, step):
        part = slice(start, min(start + step, length))
        yield Tile(part, part) if along else Tile((slice(None), part), slice(None))


# ---------------------------------------------------------------- torch's own kernels


def has_native(x: Tensor) -> bool:
    """On a CPU, in types whose statistics these kernels return in full precision."""
    return x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)


def native_moments(cells: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance (C,) of cells (1, positions, C)."""
    mean, var = aten.batch_norm_update_stats(_image(cells), None, None, 0.0)
    return mean, var


def moments_of_batch(x: Tensor) -> tuple[Tensor, Tensor]:
    """The same (C,) of a tensor (N, C, *spatial), whatever its memory."""
    mean, var = aten.batch_norm_update_stats(x, None, None, 0.0)
    return mean, var


def native_sums(grad: Tensor, cells: Tensor) -> tuple[Tensor, Tensor]:
    """Σ grad·x and Σ grad (C,): the gradients of a batch norm with mean 0 and deviation 1."""
    zero, one = cells.new_zeros(cells.shape[2]), cells.new_ones(cells.shape[2])
    mask = [False, True, True]
    _, scale, shift = aten.native_batch_norm_backward(
        _image(grad), _image(cells), None, None, None, zero, one, True, 0.0, mask
    )
    return scale, shift


def _image(cells: Tensor) -> Tensor:
    """(1, positions, C) as an image (1, C, positions, 1) in channels_last memory."""
    return cells.unsqueeze(2).permute(0, 3, 1, 2)
