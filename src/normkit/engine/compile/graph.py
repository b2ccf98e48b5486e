"""What torch.compile sees of a layer: expressions, or operators that hold Triton kernels.

A compiler fuses expressions with what stands around them, but its reductions over maps are slower
than ours. So each family of layers goes through a graph in one of three ways:

    expression   everything is plain arithmetic, as on devices without Triton
    split        tables by an operator, the map as an expression: fused with its neighbours
    whole        one operator, residual and activation included

``COMPILED`` says which, and is the one place that is asked. Measured on an H200 (bf16,
channels_last, a training step at 128×256×56×56, in units of the memory floor): bn 1.09 split, 1.10
whole, 1.49 as an expression; gn 1.11, 1.09, 1.90; bcn 1.13, 1.11, 1.64; nn.BatchNorm2d compiled
1.27. Operators serve on a GPU, unless "torch" is forced by use_backend while the graph is made; and
in Triton's interpreter if "triton" is. In exported programs and under torch.func transforms it is
expressions. ``nk.why`` speaks of eager mode; for a graph, this page is the answer.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch
from torch import Tensor

from normkit.core.fusion import Fusion, kept_dense, lie_dense
from normkit.core.layout import Batch, Channels, Layout
from normkit.engine import dispatch, plain
from normkit.engine.compile import operators
from normkit.engine.compile.records import sizes, spread
from normkit.engine.epilogue import AffineMap

# for each family: alone, and with a residual or an activation
COMPILED = {
    "pool-sample": ("split", "whole"),
    "pool-batch": ("split", "whole"),
    "gate": ("split", "whole"),
    "channel": ("split", "whole"),
    "mix": ("split", "whole"),
    "moments": ("split", "split"),  # of layers that are in no family
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CELLS = 65_535  # of a grid
_installed = importlib.util.find_spec("triton") is not None


def fused(
    x: Tensor, fusion: Fusion, residual: Tensor | None, act: str, layout: Layout
) -> tuple[Tensor, Tensor, Any, None] | None:
    """A whole layer through operators, or None if it is to be an expression.

    As engine.fused gives it: the output, the tables, and where in them the statistics begin. If
    there is a memory it has been updated.
    """
    record = spread(fusion, isinstance(layout, Batch)) if _serves(x, layout) else None
    if record is None or not isinstance(layout, Batch | Channels):
        return None
    if not (lie_dense(*record.parameters) and kept_dense(fusion)):
        return None
    alone, followed = COMPILED[record.family]
    way = alone if residual is None and act == "none" else followed
    if way == "expression":
        return None
    period, begin, _, _ = sizes(x, record.family, record.options)
    given = *record.parameters, *record.given, *record[2:]
    if way == "whole":
        y, tables = torch.ops.normkit.fused(x, residual, *given, act)
    else:
        tables = torch.ops.normkit.coefficients(x, *given)
        scale, shift = operators.halves(tables, period, layout)
        y = plain.affine(x, AffineMap(scale, shift, residual, act), layout)
        tables = tables.detach()
    memory = fusion.memory
    if memory is not None:
        # the factor depends on the size: as a number it would tie the graph to this one
        values, less = x.numel() // memory.mean.shape[0], int(memory.correction != 1.0)
        torch.ops.normkit.remember(tables, *memory[:5], begin, values, less, memory.weight)
    return y, tables, begin, None


def moments(x: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """The moments of each cell: through an operator, or as an expression."""
    if COMPILED["moments"][0] == "expression" or not _serves(x, layout):
        return plain.moments(x, layout)
    strips = layout.strips if isinstance(layout, Channels) else 1
    mean, var = torch.ops.normkit.moments(x, isinstance(layout, Batch), strips).unbind()
    return mean, var


def _serves(x: Tensor, layout: Layout) -> bool:
    """Whether the kernels can take this tensor, in a graph that is being made."""
    # the flag, and not is_exporting(): in torch 2.11 every graph takes that for True
    if not torch.compiler.is_compiling() or torch.compiler._is_exporting_flag:
        return False
    if torch._C._are_functorch_transforms_active():
        return False
    if x.dtype not in DTYPES or not isinstance(layout, Batch | Channels):
        return False
    if x.is_cuda:
        return dispatch._forced != "torch" and _installed and _fits(layout)
    interpreted = os.environ.get("TRITON_INTERPRET") == "1" and x.device.type == "cpu"
    return interpreted and dispatch._forced == "triton" and _installed and _fits(layout)


def _fits(layout: Batch | Channels) -> bool:
    """Whether a grid holds all cells; in comparisons that a graph for any size can bear."""
    if layout.channels_last:
        return layout.extent[0] <= CELLS
    cells, positions = layout.extent
    return cells <= CELLS or (positions <= 256 and cells <= 8 * CELLS)
