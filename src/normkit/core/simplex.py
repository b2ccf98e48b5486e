"""Projections onto the simplex: weights that sum to one, more or less of them zero."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def sparsemax(z: Tensor) -> Tensor:
    """The point of the simplex nearest to z (K,)."""
    ordered, _ = torch.sort(z, descending=True)
    rank = torch.arange(1, z.shape[0] + 1, device=z.device, dtype=z.dtype)
    excess = torch.cumsum(ordered, 0) - 1
    support = (rank * ordered > excess).sum()
    threshold = excess.index_select(0, support[None] - 1) / support
    return torch.clamp(z - threshold, min=0)


def sparsestmax(z: Tensor, radius: Tensor) -> Tensor:
    """The point of the simplex nearest to z, at least ``radius`` from its middle; K = 2 or 3.

    If sparsemax(z) is nearer to the middle it is pushed out to the circle of that radius; if it
    then leaves the simplex, along the side it left by. At the largest radius, that of the
    corners, the result has a single one. From the exact middle no direction is better than
    another, and the result stays there.
    """
    k = z.shape[0]
    middle = 1 / k
    near = sparsemax(z)
    reach = near - middle
    far = middle + radius * _direction(reach)
    inside = far >= 0
    side = inside.to(z.dtype) / inside.sum()  # the middle of the side
    along = torch.where(inside, far - (far * side).sum(), 0)
    rest = torch.clamp(radius.square() - (side - middle).square().sum(), min=0)
    pushed = side + torch.sqrt(rest) * _direction(along)
    far = torch.where(inside.all(), far, pushed)
    found = torch.where(reach.square().sum() >= radius.square(), near, far)
    # rounding must neither keep the last weight from being a whole one, nor be a share itself
    tiny = 16 * torch.finfo(z.dtype).eps
    at_corner = (radius >= corner_radius(k) * (1 - tiny)) & (reach != 0).any()
    corner = (torch.arange(k, device=z.device) == z.argmax()).to(z.dtype)
    found = torch.where(at_corner, corner, torch.where(found > tiny, found, 0))
    return found / found.sum()


def corner_radius(k: int) -> float:
    """How far the corners of the simplex of K weights are from its middle."""
    return math.sqrt((k - 1) / k)


def _direction(vector: Tensor) -> Tensor:
    """vector / ‖vector‖; zero, with a finite gradient, for the zero vector."""
    square = vector.square().sum()
    safe = torch.where(square > 0, square, 1)
    return vector * torch.rsqrt(safe)
