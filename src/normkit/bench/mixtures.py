"""Straightforward formulas of the layers that mix, split or chain statistics."""

from __future__ import annotations

import torch
from torch import Tensor

from normkit.bench.of_the_batch import bn, standard
from normkit.bench.of_the_sample import grouped
from normkit.bench.pieces import (
    State,
    affine,
    batch_moments,
    moments,
    over,
    positions,
    standardize,
    track,
)


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
