"""What is outside the affine family, in plain torch: condensation score, depthwise convolution,
whitening of channel groups."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from normkit.core.layout import Channels, dense, is_channels_last
from normkit.core.moments import Moments
from normkit.core.precision import statistics_dtype, without_autocast
from normkit.core.processes import Processes, total


def condensation_score(x: Tensor, moments: Moments) -> Tensor:
    """Mean cosine between the samples of x over all ordered pairs; 1 for a single sample.

    With unit vectors u_n the pairs need not be formed: (‖Σ u_n‖² − n) / (n(n − 1)). The norms
    come from the moments, so this is one more read of x: O(nD). A zero sample has cosine 0 with
    every other. No gradient, no host synchronisation.
    """
    if x.shape[0] == 1:
        return torch.ones((), device=x.device, dtype=moments.mean.dtype)
    with torch.no_grad():
        total = weighted_sum(x, _inverse_norms(moments))
        n = moments.filled_rows()  # of a mask, which may leave nothing of a sample
        score = (total.square().sum() - n) / (n * (n - 1))
        return torch.where(n > 1, score, 1) if isinstance(n, Tensor) else score


@torch.no_grad()
def shared_condensation(
    x: Tensor, moments: Moments, limit: int | None, score: Tensor, processes: Processes
) -> tuple[Tensor, Tensor, Tensor]:
    """The same of the first ``limit`` samples of all processes; how many these were; and the score
    so far, averaged over the processes: their branch must be the same, also after an evaluation in
    which each has seen other data.

    The samples stand in the order of the processes. Those of several processes have cosines too,
    so the sum of unit vectors is shared: as many numbers as a sample has.
    """
    n, dtype = x.shape[0], moments.mean.dtype
    weight, counted = _inverse_norms(moments), moments.mean.new_ones(n)
    if isinstance(moments.count, Tensor) and moments.count.dim() == 2:
        counted = (moments.count > 0).any(1).to(dtype)  # a mask may leave nothing of a sample
    if limit is not None:
        sizes = torch.zeros(processes.size, device=x.device, dtype=dtype)
        sizes[processes.rank] = n
        before = total(sizes, processes)[: processes.rank].sum()
        place = torch.arange(n, device=x.device, dtype=dtype)
        counted = counted * (place + before < limit)
    flat = weighted_sum(x, weight * counted) if n else x.new_zeros(x.shape[1:].numel())
    parts = total(torch.cat([flat.to(dtype), counted.sum()[None], score.to(dtype)]), processes)
    samples, square = parts[-2], parts[:-2].square().sum()
    pairs = samples * (samples - 1)
    new = torch.where(pairs > 0, (square - samples) / pairs.clamp(min=1), 1)
    return new, samples, (parts[-1:] / processes.size).to(score.dtype)


def _inverse_norms(moments: Moments) -> Tensor:
    """1/‖x_n‖ of each sample, 0 for a sample of zeros."""
    squares = ((moments.var + moments.mean.square()) * moments.count).sum(1)
    return torch.where(squares > 0, squares.rsqrt(), 0)


def weighted_sum(x: Tensor, weight: Tensor) -> Tensor:
    """Σ_n weight[n] · x_n as one flat vector in the order of memory."""
    x = dense(x)
    flat = Channels(x).view(x).reshape(x.shape[0], -1)
    return torch.mv(flat.to(weight.dtype).mT, weight)


_CONVOLUTION = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def depthwise(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Each channel convolved with its own kernel (C, 1, *k), zero padding, size unchanged.

    A tensor (N, C) is a map of one position. Under autocast the types follow autocast's rule for
    convolutions; otherwise the kernel is used in x's type.
    """
    dims = weight.dim() - 2
    flat = x.dim() == 2
    if flat:
        x = x.reshape(*x.shape, *(1,) * dims)
    padding = [k // 2 for k in weight.shape[2:]]
    weight = weight.to(x.dtype)
    bias = None if bias is None else bias.to(x.dtype)
    y = _CONVOLUTION[dims](x, weight, bias, padding=padding, groups=x.shape[1])
    return y.flatten(1) if flat else y


def whiten_groups(
    x: Tensor, groups: int, eps: float, iterations: int, method: str, valid: Tensor | None = None
) -> Tensor:
    """W·(x − mean) with x as (N, groups, values) and W = (covariance + eps)^(−1/2) per sample.

    Groups are consecutive channels, so channels_last tensors with several channels a group are
    copied once; the output has the memory format of x. Runs in float32 or wider. With a mask
    (N, 1, *spatial) mean and covariance are those of valid positions.
    """
    dtype = statistics_dtype(x.dtype)
    with without_autocast(x.device):
        grouped = x.reshape(x.shape[0], groups, -1).to(dtype)  # (N, g, m)
        if valid is None:
            count: int | Tensor = grouped.shape[2]
            centred = grouped - grouped.mean(2, keepdim=True)
        else:
            seen = valid.expand_as(x).reshape(grouped.shape)
            count = seen[:, :1].sum(2, keepdim=True).clamp(min=1)
            mean = torch.where(seen, grouped, 0).sum(2, keepdim=True) / count
            centred = torch.where(seen, grouped - mean, 0)
        covariance = centred @ centred.mT / count  # (N, g, g)
        covariance = covariance + eps * torch.eye(groups, dtype=dtype, device=x.device)
        root = _newton(covariance, iterations) if method == "newton" else _eigh(covariance)
        y = (root @ centred).to(x.dtype).reshape(x.shape)
    if is_channels_last(x):
        y = y.movedim(1, -1).contiguous().movedim(-1, 1)
    return y


def _newton(covariance: Tensor, iterations: int) -> Tensor:
    """Newton's iteration P ← 1.5·P − 0.5·P³·Σ towards Σ^(−1/2), Σ divided by its trace.

    With Q = P·Σ carried along, a step is P ← M·P, Q ← Q·M for M = 1.5 − 0.5·P·Q: the same in
    exact arithmetic, but rounding errors shrink instead of growing with the iterations.
    """
    trace = covariance.diagonal(dim1=1, dim2=2).sum(1)[:, None, None]
    scaled = covariance / trace
    one = torch.eye(covariance.shape[1], dtype=covariance.dtype, device=covariance.device)
    p, q = one.expand_as(covariance), scaled
    for _ in range(iterations):
        step = 1.5 * one - 0.5 * p @ q
        p, q = step @ p, q @ step
    return p / torch.sqrt(trace)


def _eigh(covariance: Tensor) -> Tensor:
    """The exact inverse square root (ZCA)."""
    values, vectors = torch.linalg.eigh(covariance)
    return (vectors * values.rsqrt().unsqueeze(1)) @ vectors.mT
