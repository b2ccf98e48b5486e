"""What Triton computes as a whole outside the affine family: a norm with the depthwise convolution
after it, positional normalization, and the weights of convolutions.

Families need Triton, so they are imported when a path has been decided that has it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from normkit.core.fusion import Depthwise, Pixel
from normkit.core.layout import Batch, Channels, Layout
from normkit.core.statistics import Repetition
from normkit.engine import plain
from normkit.engine.dispatch import Path, decide_weight
from normkit.engine.epilogue import check


def normalized_depthwise(
    x: Tensor,
    description: Depthwise,
    residual: Tensor | None,
    activation: str,
    cells: Callable[[Tensor], Layout],
    repetition: Repetition,
    record: Any = None,
) -> tuple[Tensor, Tensor, int]:
    """A norm, the convolution after it and what follows, with an activation of ``BY_RESULT``; a
    tensor, and where in it the statistics of the batch begin. A ``record`` is told what is
    launched."""
    from normkit.engine.families import depthwise

    layout = cells(x)
    assert isinstance(layout, Batch | Channels)
    return depthwise.fused_depthwise(
        x, description, residual, activation, layout, repetition, record
    )


def normalized_pixels(
    path: Path,
    x: Tensor,
    description: Pixel,
    residual: Tensor | None,
    activation: str,
    record: Any = None,
) -> Tensor | None:
    """Positional normalization by a kernel, or as an expression, of which a compiler makes one.

    None on other paths. A ``record`` is told what is launched.
    """
    check(x, residual, activation)
    if path.name == "expression":
        eps, correction, weight, bias = description
        return plain.pixels(x, weight, bias, residual, eps, correction, activation)
    if path.name != "fused":
        return None
    from normkit.engine.families import pixel

    return pixel.fused_pixels(x, description, residual, activation, record)


def standardized_filters(weight: Tensor, count: int, eps: float, outside: bool) -> Tensor | None:
    """(w − mean) / deviation of each filter, in the type autocast wants; None if Triton cannot.

    The deviation is the root of (sum of squares / count + eps), or eps is added to the root.
    """
    if decide_weight(weight).name != "fused":
        return None
    from normkit.engine.families import filters

    return filters.one(weight, count, eps, outside, wanted_type(weight))


def standardized_together(
    weights: Sequence[Tensor], less: int, eps: float, outside: bool
) -> tuple[Tensor, ...] | None:
    """(w − mean) / deviation of every filter of every weight; None if Triton cannot.

    All weights have one type and device. ``less`` is what the variance is short of a mean: 0 or 1.
    """
    if not all(decide_weight(weight, longest=None).name == "fused" for weight in weights):
        return None
    from normkit.engine.families import filters

    return filters.many(weights, less, eps, outside, wanted_type(weights[0]))


def wanted_type(weight: Tensor) -> torch.dtype:
    """The type of the result: what the convolution would turn it into."""
    kind = weight.device.type
    if weight.dtype == torch.float32 and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return weight.dtype
