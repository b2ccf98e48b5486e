"""Measures of parameters: their effect on gradients, and how far they have come."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from normkit.diagnosis.measures.statistics import wide
from normkit.errors import ShapeError


class Drift(NamedTuple):
    """How far a parameter is from its start: root mean square, and the largest. Scalars."""

    rms: Tensor
    largest: Tensor


def gradient_factor(weight: Tensor | None, var: Tensor, eps: float = 1e-5) -> Tensor:
    """γ / √(σ² + ε) per channel: what a norm multiplies the gradient with on its way down.

    Signed, as γ is. ``var`` is the variance of the batch; no weight counts as 1.

    Paper: Davis and Frank 2022 (revisiting-bn), eq. 20.
    """
    factor = (var.detach() + eps).rsqrt()
    return factor if weight is None else weight.detach().reshape(factor.shape) * factor


def drift(now: Tensor, start: Tensor) -> Drift:
    """The distance of a parameter from its start, per entry: widths can be compared."""
    if now.shape != start.shape:
        raise ShapeError(
            f"A parameter and its start expected, got {tuple(now.shape)} and {tuple(start.shape)}."
        )
    if now.numel() == 0:
        return Drift(torch.zeros(()), torch.zeros(()))
    distance = (wide(now) - wide(start.to(now.device))).abs()
    return Drift(drift_rms(now, start), distance.max())


def drift_rms(now: Tensor, start: Tensor) -> Tensor:
    """The root mean square alone, in few operations: it is taken while a model trains."""
    distance = wide(now) - start.detach().to(now.device)
    return distance.square().mean().sqrt()


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
