"""Measures of means and variances: estimation shift, groups of channels, gradients."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from normkit.core.moments import Moments
from normkit.core.precision import widest
from normkit.errors import ShapeError

Statistics = Moments | tuple[Tensor, Tensor]  # or a plain pair (mean, var), one entry a channel
Pair = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]


class ESM(NamedTuple):
    """Estimation shift magnitude: of the means, and of the standard deviations. Scalars."""

    mean: Tensor
    std: Tensor


def esm(running: Statistics, expected: Statistics) -> ESM:
    """‖μ̂ − μ̃‖₂ and ‖σ̂ − σ̃‖₂ over the channels of a layer; not divided by the width.

    ``running`` are the estimates a layer uses in eval mode, ``expected`` mean and variance of what
    it is given then. Both 0 if the estimates come from an exact pass over the same data.

    Paper: Huang et al. 2022 (estimation shift), definition 2; without eps, as there.
    """
    return _esm(_pair(running, expected))


def output_error(running: Statistics, expected: Statistics, eps: float = 1e-5) -> Tensor:
    """Per channel: mean square of what wrong statistics add to the standardized output.

    E[(x̂ − x̃)²] with x̂ = (x − μ̂)/√(σ̂² + eps) and x̃ = (x − μ̃)/√(σ̃² + eps), x having mean μ̃ and
    variance σ̃². Unlike the ESM it has no unit, so layers can be compared: 1 means that the error
    is as large as the signal.
    """
    return _error(_pair(running, expected), eps)


def esm_and_error(running: Statistics, expected: Statistics, eps: float) -> tuple[ESM, Tensor]:
    """Both, where they are computed while a model trains."""
    pair = _pair(running, expected)
    return _esm(pair), _error(pair, eps)


def _esm(pair: Pair) -> ESM:
    (mean, var), (true_mean, true_var) = pair
    shift = var.clamp(min=0).sqrt() - true_var.clamp(min=0).sqrt()
    norm = torch.linalg.vector_norm  # Tensor.norm does the same after much Python
    return ESM(norm(mean - true_mean), norm(shift))


def _error(pair: Pair, eps: float) -> Tensor:
    (mean, var), (true_mean, true_var) = pair
    scale, true_scale = (var + eps).rsqrt(), (true_var + eps).rsqrt()
    return true_var * (scale - true_scale).square() + ((true_mean - mean) * scale).square()


def _pair(a: Statistics, b: Statistics) -> Pair:
    first, second = mean_and_var(a), mean_and_var(b)
    if len({t.shape for t in (*first, *second)}) > 1:
        shapes = [tuple(t.shape) for t in (*first, *second)]
        raise ShapeError(
            f"Statistics of one layer expected, one entry a channel each, got shapes {shapes}."
        )
    return first, (second[0].to(first[0].device), second[1].to(first[1].device))


def mean_and_var(statistics: Statistics) -> tuple[Tensor, Tensor]:
    """Mean and variance (K,) in float64; moments of several samples are pooled."""
    if isinstance(statistics, Moments):
        mean, var = wide(statistics.mean), wide(statistics.var)
        if mean.shape[0] > 1:
            pooled = Moments(mean, var, statistics.count).pooled(samples=None)
            mean, var = pooled.mean, pooled.var
        return mean[0], var[0]
    mean, var = statistics
    return wide(mean).flatten(), wide(var).flatten()


def wide(tensor: Tensor) -> Tensor:
    """The same in float64, or in float32 on devices that have nothing wider."""
    return tensor.detach().to(widest(tensor.device))


def stat_diff(mean: Tensor, var: Tensor, groups: int = 1) -> Tensor:
    """Per group: std of the channels' means over the mean of their stds, (G,). 0 / 0 is 0.

    0 for channels that are alike; large if a few of them decide the statistics of all. ``mean``
    and ``var`` are per channel, of what the norm is given; a layer's value is the mean over its
    groups.

    Paper: Qiao et al. 2019 (ws-bcn), eq. 35; running variances there are read as their roots.
    """
    means, stds = _grouped(mean, var, groups)
    spread, scale = means.var(1, correction=0).sqrt(), stds.mean(1)
    return (spread / scale).masked_fill(spread == 0, 0.0)


def under_represented(
    mean: Tensor, var: Tensor, groups: int = 1, *, least: float = 0.1, reach: float = 3.0
) -> Tensor:
    """Which channels their group drowns, a boolean (C,); the mean of it is their share.

    Once the group is standardized as one, a channel is under-represented if its own std is below
    ``least``, where 1 is that of the group, or if its mean lies more than ``reach`` of its stds
    below 0, so that a ReLU hardly ever lets it pass. The paper (ws-bcn, section 6.1) describes
    both and gives no numbers.
    """
    means, stds = _grouped(mean, var, groups)
    each = Moments(means.reshape(1, -1), stds.square().reshape(1, -1), 1)
    group = each.pooled(channels=means.shape[1])
    center, scale = group.mean.reshape(-1, 1), group.var.sqrt().reshape(-1, 1)
    weak = stds < least * scale
    off = means - center + reach * stds < 0
    return (weak | off).flatten()


def _grouped(mean: Tensor, var: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Means and stds (G, C/G) in float64."""
    mean, var = mean_and_var((mean, var))
    if mean.shape != var.shape or groups < 1 or mean.numel() % groups:
        raise ShapeError(
            f"Means and variances (C,) expected with C divisible by groups={groups}, "
            f"got {tuple(mean.shape)} and {tuple(var.shape)}."
        )
    return mean.reshape(groups, -1), var.clamp(min=0).sqrt().reshape(groups, -1)
