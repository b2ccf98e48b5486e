"""The depthwise convolution that follows the affine map in bnet and ubn."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from normkit.core.fusion import Fusion
from normkit.core.layout import Batch, Channels, Layout
from normkit.engine.backends import choose
from normkit.engine.normalize import dense, expression_wanted

_CONVOLUTION = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def depthwise(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Each channel convolved with its own kernel (C, 1, *k), zero padding, size unchanged.

    A tensor (N, C) is a map of one position. Under autocast the types follow autocast's rule for
    convolutions; otherwise the kernel is used in x's type.
    """
    dims = weight.dim() - 2
    flat = x.dim() == 2
    if flat:
        x = x.reshape(*x.shape, *(1,) * dims)
    padding = [k // 2 for k in weight.shape[2:]]
    weight = weight.to(x.dtype)
    bias = None if bias is None else bias.to(x.dtype)
    y = _CONVOLUTION[dims](x, weight, bias, padding=padding, groups=x.shape[1])
    return y.flatten(1) if flat else y


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
    from normkit.engine import fused_depthwise as fast  # needs Triton, which is here

    if not fast.serves(x, weight):
        return None
    return fast.fused_depthwise(x, fusion, weight, bias, layout)
