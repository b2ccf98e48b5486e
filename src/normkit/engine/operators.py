"""What torch.compile sees of a layer: expressions, or operators that hold Triton kernels.

A compiler fuses expressions with what stands around them, but its reductions over maps are slower
than ours. So each family of layers goes through a graph in one of three ways:

    expression   everything is plain arithmetic, as on devices without Triton
    split        tables by an operator, the map as an expression: fused with its neighbours
    whole        one operator, residual and activation included

``COMPILED`` says which, and is the one place that is asked. Operators serve where Triton would in
eager mode: on a GPU, or in Triton's interpreter if use_backend("triton") is in force. Everywhere
else, in exported programs and under torch.func transforms, it is expressions.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch
from torch import Tensor

from normkit.core.fusion import Channel, Fusion, Gate, Pool
from normkit.core.layout import Batch, Channels, Layout
from normkit.engine import (
    backends,
    operators_memory,  # noqa: F401 : they define the operators
    operators_moments,  # noqa: F401
    operators_split,  # noqa: F401
    operators_whole,  # noqa: F401
    plain,
)
from normkit.engine.epilogue import AffineMap
from normkit.engine.operators_records import family_of, sizes, spread

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
CELLS = 65_535  # of a grid, if they are rows in memory; see _fits
_installed = importlib.util.find_spec("triton") is not None


def fused(
    x: Tensor, fusion: Fusion, residual: Tensor | None, act: str, layout: Layout
) -> tuple[Tensor, Tensor, Any, Tensor | None] | None:
    """A whole layer through operators, or None if it is to be an expression.

    As engine.fused gives it, running statistics included: the output, the tables and where in
    them the statistics begin, and the gates if they are kept.
    """
    family = family_of(fusion)
    way = COMPILED[family][residual is not None or act != "none"]
    if way == "expression" or not _serves(x, layout):
        return None
    if isinstance(fusion, Gate) and fusion.condensation is not None:
        return None
    record = spread(fusion, isinstance(layout, Batch))
    found = sizes(family, record.options, x.shape[0], x.shape[1])
    given = *record.parameters, *record.constants, family, record.options, record.numbers
    if way == "whole":
        y, tables, gates = torch.ops.normkit.fused(x, residual, *given, act)
    else:
        tables, gates = torch.ops.normkit.coefficients(x, *given)
        size = layout.rows, layout.columns
        scale, shift = (
            t.view(-1, layout.columns).expand(size)
            for t in (tables[: found.period], tables[found.period : 2 * found.period])
        )
        y = plain.affine(x, AffineMap(scale, shift, residual, act), layout)
    tables = tables.detach()
    _remember(fusion, x, tables, found.begin)
    return y, tables, found.begin, gates if record.options[4] else None


def moments(x: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """The moments of each cell: through an operator, or as an expression."""
    if COMPILED["moments"][0] == "expression" or not _serves(x, layout):
        return plain.moments(x, layout)
    strips = layout.strips if isinstance(layout, Channels) else 1
    mean, var = torch.ops.normkit.moments(x, isinstance(layout, Batch), strips).unbind()
    return mean, var


def _remember(fusion: Fusion, x: Tensor, tables: Tensor, begin: Any) -> None:
    """Let the statistics of the batch enter the running ones, if there are any."""
    memory = fusion.memory
    if memory is None:
        return
    if isinstance(fusion, Pool) and fusion.ramps is not None:
        fusion.ramps.old_mean.copy_(fusion.ramps.mean)
        fusion.ramps.old_std.copy_(fusion.ramps.std)
    # the factor depends on the size: as a number it would tie the graph to this one
    less = int(memory.correction != 1.0)
    values = x.numel() // memory.mean.shape[0]
    rate = fusion.rate if isinstance(fusion, Channel) else None
    conditional = isinstance(fusion, Gate) and fusion.score is not None
    torch.ops.normkit.remember(
        tables, *memory[:5], rate, begin, values, less, conditional, memory.weight
    )


def _serves(x: Tensor, layout: Layout) -> bool:
    """Whether the kernels can take this tensor, in a graph that is being made."""
    if not torch.compiler.is_compiling() or torch.compiler.is_exporting():
        return False
    if torch._C._are_functorch_transforms_active():
        return False
    if x.dtype not in DTYPES or not isinstance(layout, Batch | Channels):
        return False
    forced = backends._forced
    if x.is_cuda:
        ready = _installed and forced != "torch"
    else:
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        ready = forced == "triton" and interpreted and x.device.type == "cpu"
    return ready and _fits(layout)


def _fits(layout: Batch | Channels) -> bool:
    """Whether a grid holds all cells; in comparisons that a graph for any size can bear."""
    if layout.channels_last:
        return layout.extent[0] <= CELLS
    cells, positions = layout.extent
    return cells <= CELLS or (positions <= 256 and cells <= 8 * CELLS)
