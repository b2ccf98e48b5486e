"""Layers outside the affine family that Triton computes as a whole, where it can.

Positional normalization, a norm with the depthwise convolution after it, and the weights of
convolutions. Each function gives None where its kernels do not serve: then the layer computes with
``normalize`` and torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from normkit.core.fusion import Fusion, lie_dense
from normkit.core.layout import Batch, Channels, Layout, Pixels, dense, is_channels_last
from normkit.engine import dispatch, plain
from normkit.engine.dispatch import choose, expression_wanted
from normkit.engine.epilogue import check

MOST = 8192  # weights of a filter: they stay in registers


def fused_pixels(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    eps: float,
    correction: int = 0,
    residual: Tensor | None = None,
    activation: str = "none",
) -> Tensor | None:
    """activation(weight · (x − mean)/√(var + eps) + bias + residual), statistics of each pixel.

    An expression for compilers, which make one kernel of it. Otherwise None unless Triton is the
    chosen backend: then ``normalize`` does it.
    """
    check(x, residual, activation)
    if expression_wanted():
        return plain.pixels(x, weight, bias, residual, eps, correction, activation)
    x = dense(x)
    if not (hasattr(choose(x, needed(x)), "moment_parts") and lie_dense(weight, bias)):
        return None
    from normkit.engine.families import pixel  # needs Triton, which is here

    how = pixel.Pixel(eps, correction, activation, Pixels.of(x))
    return pixel.normalized_pixels(x, weight, bias, residual, how)


def needed(x: Tensor) -> Layout:
    """What a backend has to serve for it; not Pixels, of which the grids of other kernels may not
    hold so many: here one program takes several."""
    return Channels.of(x)


def normalized_depthwise(
    x: Tensor,
    fusion: Fusion,
    weight: Tensor,
    bias: Tensor | None,
    cells: Callable[[Tensor], Layout],
) -> tuple[Tensor, Tensor, int] | None:
    """A norm and the convolution after it, if the chosen backend does both at once.

    None otherwise. With it come a tensor and where in it the statistics of the batch begin.
    """
    if expression_wanted():
        return None
    x = dense(x)
    layout = cells(x)
    backend = choose(x, layout)
    if not (hasattr(backend, "moment_parts") and isinstance(layout, Batch | Channels)):
        return None
    from normkit.engine.families import depthwise as fast  # needs Triton, which is here

    if not fast.serves(x, weight):
        return None
    return fast.fused_depthwise(x, fusion, weight, bias, layout)


def standardized_filters(weight: Tensor, count: int, eps: float, outside: bool) -> Tensor | None:
    """(w − mean) / deviation of each filter, in the type autocast wants; None if Triton cannot.

    The deviation is the root of (sum of squares / count + eps), or eps is added to the root.
    """
    if expression_wanted() or not fits(weight):
        return None
    from normkit.engine.families import filters  # needs Triton, which is here

    return filters.one(weight, count, eps, outside, wanted_type(weight))


def fits(weight: Tensor, most: int | None = MOST) -> bool:
    """Whether Triton can standardize a weight, with filters of up to so many weights."""
    if dispatch._forced == "torch":
        return False
    if not weight.is_cuda:
        interpreted = dispatch._forced == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
        if not (interpreted and weight.device.type == "cpu"):
            return False
    size = weight.shape[1:].numel()
    small = weight.dim() > 1 and size > 1 and (most is None or size <= most) and weight.shape[0] > 0
    dense = weight.is_contiguous() or is_channels_last(weight)
    known = weight.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return small and dense and known and dispatch._triton()[0] is not None


def wanted_type(weight: Tensor) -> torch.dtype:
    """The type of the result: what the convolution would turn it into."""
    kind = weight.device.type
    if weight.dtype == torch.float32 and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return weight.dtype


def standardized_together(
    weights: Sequence[Tensor], less: int, eps: float, outside: bool
) -> tuple[Tensor, ...] | None:
    """(w − mean) / deviation of every filter of every weight; None if Triton cannot.

    All weights have one type and device. ``less`` is what the variance is short of a mean: 0 or 1.
    """
    if expression_wanted() or not all(fits(weight, most=None) for weight in weights):
        return None
    from normkit.engine.families import filters  # needs Triton, which is here

    return filters.many(weights, less, eps, outside, wanted_type(weights[0]))
