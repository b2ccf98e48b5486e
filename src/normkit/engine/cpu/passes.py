"""The four passes over activations as loops in C++; where there is none, torch's.

Tables come from torch, as they do for ``engine/torch/passes.py``, which has the same functions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from normkit.core.layout import Batch, Channels, Layout, Pixels
from normkit.core.masks import MaskedCells
from normkit.core.precision import statistics_dtype
from normkit.engine.epilogue import AffineMap
from normkit.engine.replay.build import extension_on_cpu
from normkit.engine.torch import passes as torch_passes

DTYPES = (torch.float32, torch.float64, torch.bfloat16)
PLAIN = (Tensor, torch.nn.Parameter)
ACTIVATIONS = {"none": 0, "relu": 1}


def serves(x: Tensor, layout: Layout) -> str:
    """What keeps the loops from a tensor, if anything."""
    if type(x) not in PLAIN or x.is_neg():
        return "it is no plain tensor"
    if x.dtype not in DTYPES:
        return f"its C++ part does not compute in {x.dtype}"
    if isinstance(layout, MaskedCells) or not isinstance(layout, Batch | Channels | Pixels):
        return "its C++ part knows no such cells"
    if isinstance(layout, Channels) and layout.strips > 1:
        return "its C++ part knows no strips of channels"
    return ""


def extent(layout: Any) -> tuple[float, ...]:
    """Rows, channels, positions of a cell, and whether channels run fastest. Where cells are
    pixels, these stand for channels, and channels for positions."""
    last = layout.channels_last or layout.count == 1
    if isinstance(layout, Pixels):
        last = not (layout.channels_last or layout.columns == 1)
    return layout.rows, layout.columns, layout.count, last


def moments(x: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    if serves(x, layout):
        return torch_passes.moments(x, layout)
    made = x.new_empty(2, layout.rows, layout.columns, dtype=torch.float64)
    _call("moments", [layout.aligned(x), made], extent(layout))
    mean, var = made.to(statistics_dtype(x.dtype))
    return mean, var


def affine(x: Tensor, map: AffineMap, layout: Layout) -> Tensor:
    if serves(x, layout) or not _follows(x, map):
        return torch_passes.affine(x, map, layout)
    y, (tables, steps) = layout.like(x), _tables(map)
    residual = None if map.residual is None else layout.aligned(map.residual)
    numbers = (*extent(layout), *steps, ACTIVATIONS[map.act])
    _call("map", [layout.aligned(x), residual, y, *tables], numbers)
    return y


def sums(
    grad: Tensor, x: Tensor, map: AffineMap, layout: Layout, grad_residual: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    if serves(x, layout) or not _follows(x, map) or not _same(grad, x):
        return torch_passes.sums(grad, x, map, layout, grad_residual)
    keep = layout.like(x) if grad_residual and map.act != "none" else None
    residual = None if map.residual is None else layout.aligned(map.residual)
    tables, steps = _tables(map)
    made = x.new_empty(2, layout.rows, layout.columns, dtype=torch.float64)
    numbers = (*extent(layout), *steps, ACTIVATIONS[map.act])
    given = [layout.aligned(grad), layout.aligned(x), residual, keep, *tables, made]
    _call("sums", given, numbers)
    da, db = made.to(map.scale.dtype)
    return da, db, grad if grad_residual and keep is None else keep


def input_gradient(
    grad: Tensor,
    x: Tensor,
    map: AffineMap,
    constant: Tensor | None,
    slope: Tensor | None,
    layout: Layout,
) -> Tensor:
    if serves(x, layout) or not _follows(x, map) or not _same(grad, x):
        return torch_passes.input_gradient(grad, x, map, constant, slope, layout)
    dx, (tables, steps) = layout.like(x), _tables(map)
    residual = None if map.residual is None else layout.aligned(map.residual)
    rest = [None if t is None else t.contiguous() for t in (constant, slope)]
    numbers = (*extent(layout), *steps, ACTIVATIONS[map.act], layout.columns)
    given = [layout.aligned(grad), layout.aligned(x), residual, dx, *tables, *rest]
    _call("input_gradient", given, numbers)
    return dx


def _follows(x: Tensor, map: AffineMap) -> bool:
    """Whether the loops know what follows the map."""
    rest = map.residual
    same = rest is None or (rest.dtype == x.dtype and type(rest) in PLAIN and not rest.is_neg())
    return map.act in ACTIVATIONS and same and type(map.scale) in PLAIN


def _same(grad: Tensor, x: Tensor) -> bool:
    return grad.dtype == x.dtype and type(grad) in PLAIN and not grad.is_neg()


def _tables(map: AffineMap) -> tuple[list[Tensor | None], list[int]]:
    """The tables of a map, and from one row of each to the next: 0 where all rows are one."""
    tables: list[Tensor | None] = []
    steps = []
    for table in map[:3]:
        step = 0
        if table is not None:
            table = table.detach()
            if table.stride(0) == 0:
                table = table[:1]
            table = table.contiguous() if table.dtype in DTYPES else table.float().contiguous()
            step = table.shape[1] if table.shape[0] > 1 else 0
        tables.append(table)
        steps.append(step)
    return tables, steps


def _call(name: str, tensors: list[Tensor | None], numbers: tuple[float, ...]) -> None:
    extension_on_cpu().call(name, tensors, [float(n) for n in numbers])
