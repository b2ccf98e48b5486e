"""Straightforward formulas of the layers whose statistics are those of each sample alone."""

from __future__ import annotations

import torch
from torch import Tensor

from normkit.bench.pieces import State, affine, moments, positions, standardize


def gn(s: State, x: Tensor) -> Tensor:
    return affine(s, grouped(x, s.groups, s.eps))


def grouped(x: Tensor, groups: int, eps: float) -> Tensor:
    """Standardized within each group of channels of a sample."""
    cut = x.reshape(x.shape[0], groups, -1)
    return standardize(cut, *moments(cut, (2,)), eps).reshape(x.shape)


def ln(s: State, x: Tensor) -> Tensor:
    return affine(s, standardize(x, *moments(x, (1, *positions(x))), s.eps))


def instance(s: State, x: Tensor) -> Tensor:
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
