"""Straightforward formulas of the layers whose statistics are those of the batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from normkit.bench.pieces import (
    State,
    affine,
    batch_moments,
    corrected,
    moments,
    over,
    pooled,
    positions,
    standardize,
    track,
)


def standard(s: State, x: Tensor) -> Tensor:
    """x̂ of batch norm."""
    return standardize(x, *batch_moments(s, x), s.eps)


def bn(s: State, x: Tensor) -> Tensor:
    return affine(s, standard(s, x))


def frozen_bn(s: State, x: Tensor) -> Tensor:
    return affine(s, standardize(x, over(s.running_mean, x), over(s.running_var, x), s.eps))


def ghost_bn(s: State, x: Tensor) -> Tensor:
    if not s.training:
        return bn(s, x)
    parts, means, variances = [], [], []
    for part in x.split(s.virtual_batch):
        mean, var = moments(part, (0, *positions(x)))
        parts.append(standardize(part, mean, var, s.eps))
        share = part.shape[0] / x.shape[0]
        means.append(share * mean)
        variances.append(share * corrected(var, part))
    track(s, running_mean=sum(means), running_var=sum(variances))
    return affine(s, torch.cat(parts))


def batch_renorm(s: State, x: Tensor) -> Tensor:
    running_mean, running_std = over(s.running_mean, x).clone(), over(s.running_std, x).clone()
    if not s.training:
        return affine(s, (x - running_mean) / running_std)
    mean, var = moments(x, (0, *positions(x)))
    std = torch.sqrt(var + s.eps)
    r_max = 1 + (s.r_max - 1) * _ramp(s.num_batches_tracked, s.r_ramp)
    d_max = s.d_max * _ramp(s.num_batches_tracked, s.d_ramp)
    with torch.no_grad():
        r = (std / running_std).clamp(1 / r_max, r_max)
        d = ((mean - running_mean) / running_std).clamp(-d_max, d_max)
    track(s, running_mean=mean, running_std=std)
    return affine(s, (x - mean) / std * r + d)


def _ramp(step: Tensor, ramp: tuple[int, int] | None) -> Tensor:
    """From 0 at the first step of the ramp to 1 at its last."""
    if ramp is None:
        return torch.ones_like(step, dtype=torch.float32)
    start, end = ramp
    return ((step - start) / (end - start)).clamp(0, 1)


def shifted_bn(s: State, x: Tensor) -> Tensor:
    return affine(s, standard(s, x) * over(s.target_std, x) + over(s.target_mean, x))


def rbn(s: State, x: Tensor) -> Tensor:
    centered = x + over(s.center_weight, x) * pooled(x)
    normal = standard(s, centered)
    gate = torch.sigmoid(over(s.gate_weight, x) * pooled(normal) + over(s.gate_bias, x))
    return affine(s, gate * normal)


def iebn(s: State, x: Tensor) -> Tensor:
    gate = torch.sigmoid(over(s.gate_weight, x) * pooled(x) + over(s.gate_bias, x))
    return affine(s, gate * standard(s, x))


def bnet(s: State, x: Tensor) -> Tensor:
    return _depthwise(s, standard(s, x))


def ubn(s: State, x: Tensor) -> Tensor:
    centered = x + over(s.center_weight, x) * pooled(x)
    mean, var = over(s.running_mean, x).clone(), over(s.running_var, x).clone()
    if s.training:
        with torch.no_grad():
            s.score.copy_(s.score_decay * s.score + (1 - s.score_decay) * _similarity(x))
        condensed = s.score > s.tau
        batch_mean, batch_var = moments(centered, (0, *positions(x)))
        track(s, condensed, running_mean=batch_mean, running_var=corrected(batch_var, centered))
        mean = torch.where(condensed, batch_mean, mean)
        var = torch.where(condensed, batch_var, var)
    normal = standardize(centered, mean, var, s.eps)
    gate = torch.sigmoid(over(s.gate_weight, x) * pooled(normal) + over(s.gate_bias, x))
    return gate * _depthwise(s, normal)


def _similarity(x: Tensor) -> Tensor:
    """The mean cosine of pairs among the first 16 samples, as the authors take it."""
    flat = F.normalize(x[:16].flatten(1), dim=1)
    n = flat.shape[0]
    return ((flat @ flat.mT).sum() - n) / (n * (n - 1))


def _depthwise(s: State, x: Tensor) -> Tensor:
    if s.weight is None:
        return x
    return F.conv2d(x, s.weight, s.bias, padding=s.kernel_size // 2, groups=x.shape[1])
