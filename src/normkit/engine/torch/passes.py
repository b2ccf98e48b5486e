"""The four passes over activations in plain torch: any device, the reference of all backends.

On a CPU the tensor is worked through in tiles that stay in the cache, so each pass reads memory
once although it takes several torch calls. Elsewhere a tile is the whole tensor.

Two passes of whole channels have a fused CPU kernel in torch: batch norm's own kernels reduce over
a batch whose channels run fastest in memory in one call, where torch's general reductions take
three. The input is shown to them as a channels_last image.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from normkit.core.layout import Batch, Layout
from normkit.core.masks import MaskedCells
from normkit.core.precision import statistics_dtype
from normkit.engine.epilogue import AffineMap, before, epilogue_

aten = torch.ops.aten

IN_A_ROW = 256  # additions of one sum: rounding errors stay near those of pairwise sums
TABLE = 1 << 10  # sums at a time: they and what they need stay in the nearest cache
TILE = 1 << 20  # elements: 4 MB of float32, where a few calls a tile cost less than memory


class Tile(NamedTuple):
    """A part of the view, and the part of a laid table that belongs to it."""

    cells: Any
    table: slice


def moments(x: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of each cell, tables (N, K): one read of x.

    Taken about the mean of a few values, so that the sums are of small numbers: the mean is right
    to rounding, however far from zero, and the variance of equal values is exactly 0.
    """
    cells = layout.view(x)
    if isinstance(layout, MaskedCells):
        return _masked_moments(cells.to(statistics_dtype(x.dtype)), layout)
    near = layout.near(cells, 16).to(statistics_dtype(x.dtype))
    means, variances, lengths = [], [], []
    scratch = None
    for tile in _tiles(cells, layout):
        part, about = cells[tile.cells], layout.over(near[tile.table])
        scratch = torch.sub(part, about, out=_reuse(scratch, part))
        if isinstance(layout, Batch) and has_native(scratch):
            mean, var = native_moments(scratch)
        else:
            mean = layout.mean(scratch)
            aten.mse_loss.out(scratch, layout.over(mean), 0, out=scratch)  # (scratch − mean)²
            var = layout.mean(scratch)
        means.append(mean)
        variances.append(var)
        lengths.append(part.shape[1])
    if len(means) == 1:
        mean, var = means[0], variances[0]
    elif cells.shape[0] > 1:
        mean, var = torch.cat(means), torch.cat(variances)
    else:  # parts of one row
        weight = near.new_tensor(lengths).div_(cells.shape[1]).view(-1, *(1,) * means[0].dim())
        mean = (torch.stack(means) * weight).sum(0)
        apart = torch.stack(means) - mean
        var = (torch.addcmul(torch.stack(variances), apart, apart) * weight).sum(0)
    return layout.lift(near + mean), layout.lift(var)


def _masked_moments(cells: Tensor, layout: MaskedCells) -> tuple[Tensor, Tensor]:
    """The same of a padded batch that is zero in the padding."""
    near = layout.mean_of_blank(cells)
    apart = torch.where(layout.cells, cells.sub(layout.over(near)), 0)
    rest = layout.mean_of_blank(apart)  # what rounding has left
    var = layout.mean_of_blank(apart.square_()).sub_(rest.square())
    return layout.lift(near + rest), layout.lift(var.clamp_(min=0))


def affine(x: Tensor, map: AffineMap, layout: Layout) -> Tensor:
    """activation(scale · (x − center) + shift + residual): one read of x (and residual), one
    write."""
    out = layout.like(x)
    cells, result = layout.view(x), layout.view(out)
    tables = _Tables(map, layout)
    rest = None if map.residual is None else layout.view(map.residual)
    for tile, table in _tiles(cells, layout):
        direct = result[tile] if x.dtype == map.scale.dtype else None
        part = cells[tile].to(map.scale.dtype)
        y = _mapped(part, *tables.at(table), direct)
        epilogue_(y, None if rest is None else rest[tile], map.act)
        if direct is None:
            result[tile] = y
    return out


def sums(
    grad: Tensor, x: Tensor, map: AffineMap, layout: Layout, grad_residual: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Σ g·(x − center) and Σ g of each cell, g the gradient before the activation; and g if asked
    for.

    One read of grad and x. The sign of what went into the activation is recomputed, not stored.
    """
    cells, dy = layout.view(x), layout.view(grad)
    if isinstance(layout, Batch) and has_native(x) and map.act == "none":
        parts = [native_sums(dy[t], cells[t], map.center) for t, _ in _tiles(cells, layout)]
        da, db = (sum(each[1:], each[0]) for each in zip(*parts, strict=True))
        return layout.lift(da), layout.lift(db), grad if grad_residual else None
    tables, dtype = _Tables(map, layout), map.scale.dtype
    rest = None if map.residual is None else layout.view(map.residual)
    keep = layout.like(x) if grad_residual and map.act != "none" else None
    kept = None if keep is None else layout.view(keep)
    scales, shifts = [], []
    scratch = None
    for tile, table in _tiles(cells, layout):
        part, here = cells[tile].to(dtype), tables.at(table)
        between = None if rest is None else rest[tile]
        g = _before(dy[tile].to(dtype), part, here, between, map.act)
        scratch = _reuse(scratch, part)
        if here.center is None:
            scratch = torch.mul(g, part, out=scratch)
        else:
            scratch = torch.sub(part, here.center, out=scratch).mul_(g)
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
    """scale · g + constant + slope · (x − center): one read of grad and x, one write."""
    out = layout.like(x)
    cells, dy, result = layout.view(x), layout.view(grad), layout.view(out)
    tables, dtype = _Tables(map, layout), map.scale.dtype
    rest = None if map.residual is None else layout.view(map.residual)
    c0 = None if constant is None else layout.lay(constant)
    c1 = None if slope is None else layout.lay(slope)
    for tile, table in _tiles(cells, layout):
        part, here = cells[tile].to(dtype), tables.at(table)
        between = None if rest is None else rest[tile]
        g = _before(dy[tile].to(dtype), part, here, between, map.act)
        direct = result[tile] if x.dtype == dtype else None
        added = None if c0 is None else layout.over(c0[table])
        if c1 is None:
            dx = _mapped(g, here.scale, added, None, direct)
        else:
            dx = _mapped(part, layout.over(c1[table]), added, here.center, direct)
            dx.addcmul_(g, here.scale)
        if direct is None:
            result[tile] = dx
    return out


class _Here(NamedTuple):
    """The tables of a map for one tile, made to broadcast with it."""

    scale: Tensor
    shift: Tensor | None
    center: Tensor | None


class _Tables:
    """The tables of a map, laid over the view."""

    def __init__(self, map: AffineMap, layout: Layout) -> None:
        self.laid = [None if t is None else layout.lay(t) for t in map[:3]]
        self.layout = layout

    def at(self, table: slice) -> _Here:
        over = self.layout.over
        return _Here(*(None if t is None else over(t[table]) for t in self.laid))  # type: ignore[arg-type]


def _before(g: Tensor, part: Tensor, here: _Here, residual: Tensor | None, act: str) -> Tensor:
    """The gradient before the activation."""
    if act == "none":
        return g
    pre = _mapped(part, *here, None)
    if residual is not None:
        pre += residual
    return before(g, pre, act)


def _mapped(
    part: Tensor, a: Tensor, b: Tensor | None, c: Tensor | None, out: Tensor | None
) -> Tensor:
    """a · (part − c) + b. One call less where the tables run along memory."""
    if c is not None:
        part = out = torch.sub(part, c, out=out)
    if b is None:
        return torch.mul(part, a, out=out)
    if a.shape[-1] > 1:
        return torch.addcmul(b, part, a, out=out)
    return torch.mul(part, a, out=out).add_(b)


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


def native_sums(grad: Tensor, cells: Tensor, center: Tensor | None) -> tuple[Tensor, Tensor]:
    """Σ grad·(x − center) and Σ grad (C,): the gradients of a batch norm with deviation 1.

    The kernel adds one position to the next, and with many of them digits are lost. So several
    positions are shown to it as one with so many times the channels, whose sums are added after.
    """
    positions, channels = cells.shape[1:]
    together = _together(positions, channels)
    grad, cells = (t.reshape(1, -1, together * channels) for t in (grad, cells))
    one = cells.new_ones(together * channels)
    middle = torch.zeros_like(one)
    if center is not None:
        middle = center.reshape(-1).to(cells.dtype).repeat(together)
    mask = [False, True, True]
    _, scale, shift = aten.native_batch_norm_backward(
        _image(grad), _image(cells), None, None, None, middle, one, True, 0.0, mask
    )
    if together == 1:
        return scale, shift
    return scale.view(together, channels).sum(0), shift.view(together, channels).sum(0)


@lru_cache(maxsize=4096)
def _together(positions: int, channels: int) -> int:
    """How many positions are one for the kernel: a divisor that leaves it IN_A_ROW or few more."""
    most = min(max(1, positions // IN_A_ROW), max(1, TABLE // channels))
    return next(n for n in range(most, 0, -1) if positions % n == 0)


def _image(cells: Tensor) -> Tensor:
    """(1, positions, C) as an image (1, C, positions, 1) in channels_last memory."""
    return cells.unsqueeze(2).permute(0, 3, 1, 2)
