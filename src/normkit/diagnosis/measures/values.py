"""Measures of what passes a norm: channels that are off, outliers, gates, samples alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from normkit.core.moments import Moments
from normkit.core.precision import without_autocast
from normkit.engine.torch.operations import condensation_score
from normkit.errors import OptionError, ShapeError


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


def gate_saturation(gates: Tensor, margin: float = 0.05) -> Tensor:
    """The share of gates below ``margin`` or above 1 − margin: a scalar.

    ``gates`` are the values of a sigmoid, as in rbn, iebn and ubn. At 0.05 its slope, s·(1 − s), is
    a fifth of the largest: the gate hardly learns any more.
    """
    if not 0 <= margin < 0.5:
        raise OptionError(f"gate_saturation expects a margin from 0 to 0.5, got {margin!r}.")
    if gates.numel() == 0:
        return torch.zeros((), device=gates.device)
    gates = gates.detach()
    return ((gates < margin) | (gates > 1 - margin)).float().mean()


def frozen_share(scores: Tensor | Sequence[Tensor | float], tau: float | Sequence[float]) -> float:
    """The share of ubn layers whose running score is not above their threshold.

    Such a layer is a fixed map: it neither uses nor learns the statistics of a batch (ubn, eq. 3).
    A score that is NaN counts as frozen, as in the layer. Without layers the share is 0.
    """
    values = [float(score) for score in scores]
    taus = [float(tau)] * len(values) if isinstance(tau, int | float) else [float(t) for t in tau]
    if len(taus) != len(values):
        raise OptionError(
            f"frozen_share expects one tau, or one a score, got {len(taus)} for {len(values)}."
        )
    frozen = [not score > limit for score, limit in zip(values, taus, strict=True)]
    return sum(frozen) / len(frozen) if frozen else 0.0


def condensation(x: Tensor, samples: int | None = None) -> Tensor:
    """Mean cosine between the flattened samples of x over all pairs: a scalar, 1 for one sample.

    Of the first ``samples`` if given. A sample of zeros has cosine 0 with every other and, as in
    the layer ubn, lowers the score by 1 / (n(n − 1)) besides.

    Paper: Wang et al. 2024 (ubn); above 0.3 its figures call features condensed.
    """
    flat = _flat(x, samples)
    with without_autocast(x.device):
        return condensation_score(flat, Moments(flat, torch.zeros_like(flat), 1))


def condensation_matrix(x: Tensor, samples: int | None = None) -> Tensor:
    """The cosines between all samples, (n, n): what the score is the mean of, off the diagonal."""
    flat = _flat(x, samples)
    norm = flat.norm(dim=1, keepdim=True)
    unit = torch.where(norm > 0, flat / norm, 0)
    with without_autocast(x.device):
        return unit @ unit.mT


def _flat(x: Tensor, samples: int | None) -> Tensor:
    if x.dim() < 2 or x.shape[0] == 0:
        raise ShapeError(f"Condensation is of a batch (N, …) with N ≥ 1, got {tuple(x.shape)}.")
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.detach()[:samples].flatten(1).to(wide)
