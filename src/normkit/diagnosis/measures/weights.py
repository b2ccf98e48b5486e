"""The gradient of a standardized weight, taken apart."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from normkit.diagnosis.measures.shift import wide
from normkit.errors import ShapeError


class GradientParts(NamedTuple):
    """Per output channel (O,): a + b + c = ‖g‖². Only c reaches the weight."""

    a: Tensor  # removed by the division by the standard deviation
    b: Tensor  # removed by the subtraction of the mean
    c: Tensor  # var(W) · ‖gradient of W‖²


def ws_gradient_decomposition(weight: Tensor, grad: Tensor) -> GradientParts:
    """What weight standardization takes from a gradient, and what it leaves.

    ``weight`` is W before standardization, ``grad`` = g the gradient at Ŵ = (W − mean) / std, both
    (O, …) with I = W[0].numel() values each, and eps = 0:

        A = ⟨Ŵ, g⟩² / I    B = ⟨1, g⟩² / I    C = var(W) · ‖∂L/∂W‖²

    An output channel whose weights are all equal has no Ŵ; there A = 0, B as above, and C the rest.

    Paper: Qiao et al. 2019 (ws-bcn), figure 4.
    """
    if weight.shape != grad.shape or weight.dim() < 2:
        raise ShapeError(
            "A weight (O, I, …) and a gradient of the same shape expected, "
            f"got {tuple(weight.shape)} and {tuple(grad.shape)}."
        )
    w, g = (wide(t).flatten(1) for t in (weight, grad))
    inputs = w.shape[1]
    std = w.std(1, correction=0, keepdim=True)
    unit = torch.where(std > 0, (w - w.mean(1, keepdim=True)) / std, 0)
    along = (unit * g).sum(1, keepdim=True)
    left = g - g.mean(1, keepdim=True) - unit * along / inputs  # std · ∂L/∂W
    return GradientParts(
        along[:, 0].square() / inputs, g.sum(1).square() / inputs, left.square().sum(1)
    )
