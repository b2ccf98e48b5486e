"""Pieces that several straightforward formulas share: statistics, and laying a table over x."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# a formula reads the parameters, buffers and options of a layer by name from this object
State = Any


def positions(x: Tensor) -> tuple[int, ...]:
    """The spatial axes of x (N, C, *spatial)."""
    return tuple(range(2, x.dim()))


def pooled(x: Tensor) -> Tensor:
    """Global average pooling, (N, C, 1, …)."""
    return x.mean(positions(x), keepdim=True)


def over(table: Tensor, x: Tensor) -> Tensor:
    """A table (C,) or (N, C), made to broadcast with x."""
    return table.reshape(-1, x.shape[1], *[1] * (x.dim() - 2))


def moments(x: Tensor, axes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Mean and biased variance over some axes, which stay with size one."""
    return x.mean(axes, keepdim=True), x.var(axes, correction=0, keepdim=True)


def standardize(x: Tensor, mean: Tensor, var: Tensor, eps: float) -> Tensor:
    return (x - mean) / torch.sqrt(var + eps)


def batch_moments(s: State, x: Tensor, correction: int = 1) -> tuple[Tensor, Tensor]:
    """Statistics of each channel: of the batch in training, running ones otherwise."""
    if not s.training:
        return over(s.running_mean, x), over(s.running_var, x)
    mean, var = moments(x, (0, *positions(x)))
    track(s, running_mean=mean, running_var=corrected(var, x, correction))
    return mean, var


def corrected(var: Tensor, x: Tensor, correction: int = 1) -> Tensor:
    """The variance of x divided by its count less the correction."""
    count = x.numel() // var.numel()
    return var * (count / (count - correction))


def track(s: State, where: Tensor | None = None, **new: Tensor) -> None:
    """Blend new statistics into the running ones, if the condition holds."""
    with torch.no_grad():
        s.num_batches_tracked += 1
        momentum = 1 / s.num_batches_tracked if s.momentum is None else s.momentum
        for name, value in new.items():
            buffer = getattr(s, name)
            step = momentum * (value.reshape(buffer.shape) - buffer)
            buffer += step if where is None else torch.where(where, step, 0)


def affine(s: State, x: Tensor) -> Tensor:
    """weight · x + bias, per channel, where the layer has them."""
    return x if s.weight is None else x * over(s.weight, x) + over(s.bias, x)
