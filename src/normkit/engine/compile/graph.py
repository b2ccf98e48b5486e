"""What a compiled graph gets of a layer: operators with kernels, and expressions around them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from normkit.core.fusion import Fusion
from normkit.core.layout import Batch, Channels, Layout
from normkit.engine import plain
from normkit.engine.compile import operators
from normkit.engine.compile.records import sizes, spread
from normkit.engine.dispatch import Path
from normkit.engine.epilogue import AffineMap


def fused(
    path: Path, x: Tensor, fusion: Fusion, residual: Tensor | None, act: str, layout: Layout
) -> tuple[Tensor, Tensor, Any, None]:
    """A whole layer through operators, as families.fused gives it: the output, the tables, and
    where in them the statistics begin. If there is a memory it has been updated."""
    assert isinstance(layout, Batch | Channels)
    record = spread(fusion, isinstance(layout, Batch))
    assert record is not None
    period, begin, _, _ = sizes(x, record.family, record.options)
    given = *record.parameters, *record.given, *record[2:]
    if path.name == "whole":
        y, tables = torch.ops.normkit.fused(x, residual, *given, act)
    else:
        tables = torch.ops.normkit.coefficients(x, *given)
        scale, shift, center = operators.cut_tables(tables, period, layout, 3)
        # the gradient of the center follows from that of the shift: the operator knows
        y = plain.affine(x, AffineMap(scale, shift, center.detach(), residual, act), layout)
        tables = tables.detach()
    memory = fusion.memory
    if memory is not None:
        # the factor depends on the size: as a number it would tie the graph to this one
        values, less = x.numel() // memory.mean.shape[0], int(memory.correction != 1.0)
        torch.ops.normkit.remember(tables, *memory[:5], begin, values, less, memory.weight)
    return y, tables, begin, None


def moments(x: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """The moments of each cell through an operator."""
    strips = layout.strips if isinstance(layout, Channels) else 1
    mean, var = torch.ops.normkit.moments(x, isinstance(layout, Batch), strips).unbind()
    return mean, var
