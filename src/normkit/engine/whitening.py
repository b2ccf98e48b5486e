"""Whitening of the channel groups of each sample: a covariance instead of moments."""

from __future__ import annotations

import torch
from torch import Tensor

from normkit.core.layout import is_channels_last
from normkit.core.precision import statistics_dtype, without_autocast


def whiten_groups(x: Tensor, groups: int, eps: float, iterations: int, method: str) -> Tensor:
    """W·(x − mean) with x as (N, groups, values) and W = (covariance + eps)^(−1/2) per sample.

    Groups are consecutive channels, so channels_last tensors with several channels a group are
    copied once; the output has the memory format of x. Runs in float32 or wider.
    """
    dtype = statistics_dtype(x.dtype)
    with without_autocast(x.device):
        grouped = x.reshape(x.shape[0], groups, -1).to(dtype)  # (N, g, m)
        centred = grouped - grouped.mean(2, keepdim=True)
        covariance = centred @ centred.mT / centred.shape[2]  # (N, g, g)
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
