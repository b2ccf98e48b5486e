"""Values that carry nothing: channels that are off or at a bound, and outliers."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from normkit.errors import ShapeError


class ActivityBounds(NamedTuple):
    """Between which values an activation's output lies; None if it has no such bound."""

    low: float | None = None
    high: float | None = None


def share_beyond(normalized: Tensor, limit: float = 6.0) -> Tensor:
    """The share of |x̂| > limit: a scalar. Of a normal distribution 2·10⁻⁹ lie beyond 6.

    NaN counts as beyond. ``normalized`` is without weight and bias.
    """
    if normalized.numel() == 0:
        return torch.zeros((), device=normalized.device)
    return (~(normalized.detach().abs() <= limit)).float().mean()


def dead_channels(y: Tensor, axis: int = 1) -> Tensor:
    """Channels of an activation's output that are never above 0, a boolean (C,).

    No gradient passes a ReLU there: the channel is an elimination singularity (ws-bcn, section
    3.2). The output of the norm before a ReLU gives the same answer.
    """
    return _channels_last(y, axis).amax(0) <= 0


def saturated_channels(
    y: Tensor, bounds: ActivityBounds, axis: int = 1, *, margin: float = 0.01, share: float = 1.0
) -> Tensor:
    """Channels whose values are at the bounds of an activation, a boolean (C,).

    At a bound is what lies within ``margin`` of the way between the two bounds; at least ``share``
    of a channel's values must. An activation with one bound, as ReLU, cannot saturate in this
    sense: see ``dead_channels``.
    """
    values = _channels_last(y, axis)
    low, high = bounds
    if low is None or high is None:
        return torch.zeros(values.shape[1], dtype=torch.bool, device=y.device)
    near = margin * (high - low)
    return ((values <= low + near) | (values >= high - near)).float().mean(0) >= share


def _channels_last(y: Tensor, axis: int) -> Tensor:
    """The values of each channel as a column: (values, C)."""
    if not -y.dim() <= axis < y.dim() or y.dim() < 2 or y.numel() == 0:
        raise ShapeError(
            f"A tensor with channels on axis {axis} expected, and not empty, got {tuple(y.shape)}."
        )
    return y.detach().movedim(axis, -1).flatten(0, -2)
