"""Learned scale and shift: what they do to gradients, and how far they have come."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from normkit.diagnosis.measures.shift import wide
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
