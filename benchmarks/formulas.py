"""Every activation layer as one would write it from its paper, in plain torch.

A formula has the name of its layer in the catalog, with an underscore behind a name that Python has
reserved. It uses nothing of the engine.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
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


def standard(s: State, x: Tensor) -> Tensor:
    """x̂ of batch norm."""
    return standardize(x, *batch_moments(s, x), s.eps)


def bn(s: State, x: Tensor) -> Tensor:
    return affine(s, standard(s, x))


def input_norm(s: State, x: Tensor) -> Tensor:
    return bn(s, x)


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


def gn(s: State, x: Tensor) -> Tensor:
    return affine(s, grouped(x, s.groups, s.eps))


def grouped(x: Tensor, groups: int, eps: float) -> Tensor:
    """Standardized within each group of channels of a sample."""
    cut = x.reshape(x.shape[0], groups, -1)
    return standardize(cut, *moments(cut, (2,)), eps).reshape(x.shape)


def ln(s: State, x: Tensor) -> Tensor:
    return affine(s, standardize(x, *moments(x, (1, *positions(x))), s.eps))


def rms(s: State, x: Tensor) -> Tensor:
    square = x.square().mean((1, *positions(x)), keepdim=True)
    return affine(s, x / torch.sqrt(square + s.eps))


def dyt(s: State, x: Tensor) -> Tensor:
    return affine(s, torch.tanh(s.alpha * x))


def in_(s: State, x: Tensor) -> Tensor:
    return affine(s, standardize(x, *moments(x, positions(x)), s.eps))


def pn(s: State, x: Tensor) -> Tensor:
    return affine(s, standardize(x, *moments(x, (1,)), s.eps))


def gw(s: State, x: Tensor) -> Tensor:
    cut = x.reshape(x.shape[0], s.groups, -1)  # (N, G, C/G·positions)
    cut = cut - cut.mean(2, keepdim=True)
    eye = torch.eye(s.groups, dtype=x.dtype, device=x.device)
    covariance = cut @ cut.mT / cut.shape[2] + s.eps * eye
    trace = covariance.diagonal(dim1=1, dim2=2).sum(1)[:, None, None]
    root = eye.expand_as(covariance)  # towards (covariance / trace)^(−1/2)
    for _ in range(s.iterations):
        root = 1.5 * root - 0.5 * root @ root @ root @ (covariance / trace)
    return affine(s, (root / torch.sqrt(trace) @ cut).reshape(x.shape))


def ibn(s: State, x: Tensor) -> Tensor:
    first = int(x.shape[1] * s.ratio)
    by_instance, by_batch = x[:, :first], x[:, first:]
    return affine(
        s,
        torch.cat(
            [
                standardize(by_instance, *moments(by_instance, positions(x)), s.eps),
                standard(s, by_batch),
            ],
            dim=1,
        ),
    )


def sn(s: State, x: Tensor) -> Tensor:
    return _switched(s, x, s.mean_weight.softmax(0), s.var_weight.softmax(0))


def _switched(s: State, x: Tensor, mean_shares: Tensor, var_shares: Tensor) -> Tensor:
    """Standardized by a mixture of the statistics of IN, LN and BN."""
    kinds = (
        moments(x, positions(x)),
        moments(x, (1, *positions(x))),
        batch_moments(s, x, correction=0),
    )
    mean = sum(share * kind[0] for share, kind in zip(mean_shares, kinds, strict=True))
    var = sum(share * kind[1] for share, kind in zip(var_shares, kinds, strict=True))
    return affine(s, standardize(x, mean, var, s.eps))


def ssn(s: State, x: Tensor) -> Tensor:
    shares = []
    for weight, choice in ((s.mean_weight, s.mean_choice), (s.var_weight, s.var_choice)):
        share = _sparsestmax(weight, s.radius)
        if s.training:  # a mixture that has become a single one stays it
            choice.copy_(torch.where((share == 1).any() & ~choice.any(), share.detach(), choice))
        shares.append(torch.where(choice.any(), choice.clone(), share))
    return _switched(s, x, *shares)


def _sparsestmax(z: Tensor, radius: Tensor) -> Tensor:
    """The point of the simplex nearest to z that is at least ``radius`` from its centre."""
    centre = torch.full_like(z, 1 / len(z))
    p = _sparsemax(_pushed(_sparsemax(z), centre, radius))
    face = (p > 0).to(p.dtype) / (p > 0).sum()  # the centre of the edge that p may now lie on
    within = (radius.square() - (face - centre).square().sum()).clamp(min=0).sqrt()
    return _pushed(p, face, within)


def _sparsemax(z: Tensor) -> Tensor:
    """The point of the simplex nearest to z."""
    falling = z.sort(descending=True).values
    rank = torch.arange(1, len(z) + 1, device=z.device)
    excess = (falling.cumsum(0) - 1) / rank  # what to subtract if that many entries remain
    remain = (falling > excess).sum()
    return (z - excess.gather(0, remain[None] - 1)).clamp(min=0)


def _pushed(p: Tensor, centre: Tensor, radius: Tensor) -> Tensor:
    """p moved away from the centre until it is ``radius`` away; the centre itself stays."""
    away = torch.linalg.vector_norm(p - centre)
    further = (radius / away.clamp(min=1e-12)).clamp(min=1)
    return torch.where(away > 1e-12, centre + further * (p - centre), p)


def dn(s: State, x: Tensor) -> Tensor:
    n, c = x.shape[:2]
    channels = _links(s.channel_gates)  # (C, C), rows sum to one
    mean, second = x.mean(positions(x)), x.square().mean(positions(x))
    if s.training:
        batch_moments(s, x)  # to track them
    if s.training and s.batch_gates is not None:
        blocks = torch.eye(n // s.batch, dtype=x.dtype, device=x.device)
        samples = torch.kron(blocks, _links(s.batch_gates))  # (N, N)
        mean, second = samples @ mean, samples @ second
    elif s.batch_gates is not None:
        opened = (s.batch_gates >= 0).any()
        mean = torch.where(opened, s.running_mean.expand(n, c), mean)
        running = (s.running_var + s.running_mean.square()).expand(n, c)
        second = torch.where(opened, running, second)
    mean, second = mean @ channels, second @ channels
    var = (second - mean.square()).clamp(min=0)
    return affine(s, standardize(x, over(mean, x), over(var, x), s.eps))


def _links(gates: Tensor) -> Tensor:
    """Who averages with whom: a Kronecker product with a factor for each doubling."""
    together = gates.new_full((2, 2), 0.5)
    alone = torch.eye(2, dtype=gates.dtype, device=gates.device)
    opened = (gates >= 0).to(gates.dtype) + gates - gates.detach()  # straight through
    links = gates.new_ones(1, 1)
    for gate in opened:
        links = torch.kron(alone + gate * (together - alone), links)
    return links


def bgn(s: State, x: Tensor) -> Tensor:
    cut = x.reshape(x.shape[0], s.groups, -1)  # (N, G, C·positions/G), in the order C, H, W
    return affine(s, standard(s, cut).reshape(x.shape))


def gbgn(s: State, x: Tensor) -> Tensor:
    cut = x.reshape(x.shape[0], s.groups, -1)  # (N, G, C/G·positions)
    if s.training:
        mean, var = moments(cut, (0, 2))
        axes = (0, *positions(x))
        track(s, running_mean=x.mean(axes), running_second_moment=x.square().mean(axes))
    else:
        mean = s.running_mean.reshape(1, s.groups, -1).mean(2, keepdim=True)
        second = s.running_second_moment.reshape(1, s.groups, -1).mean(2, keepdim=True)
        var = (second - mean.square()).clamp(min=0)
    return affine(s, standardize(cut, mean, var, s.eps).reshape(x.shape))


def bcn(s: State, x: Tensor) -> Tensor:
    y = grouped(bn(s, x), s.groups, s.eps)
    if s.group_weight is None:
        return y
    size = x.shape[1] // s.groups
    weight, bias = (t.repeat_interleave(size) for t in (s.group_weight, s.group_bias))
    return y * over(weight, x) + over(bias, x)
