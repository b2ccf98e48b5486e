"""Two passes for which torch has a fused CPU kernel: the moments and the sums of whole channels.

Batch norm's own kernels reduce over a batch whose channels run fastest in memory in one call,
where torch's general reductions take three. The input is shown to them as a channels_last image.
"""

from __future__ import annotations

import torch
from torch import Tensor

aten = torch.ops.aten


def serves(x: Tensor) -> bool:
    """On a CPU, in types whose statistics these kernels return in full precision."""
    return x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)


def moments(cells: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance (C,) of cells (1, positions, C)."""
    mean, var = aten.batch_norm_update_stats(_image(cells), None, None, 0.0)
    return mean, var


def moments_of_batch(x: Tensor) -> tuple[Tensor, Tensor]:
    """The same (C,) of a tensor (N, C, *spatial), whatever its memory."""
    mean, var = aten.batch_norm_update_stats(x, None, None, 0.0)
    return mean, var


def sums(grad: Tensor, cells: Tensor) -> tuple[Tensor, Tensor]:
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
