"""Projections onto the simplex: weights that sum to one, more or less of them zero."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def sparsemax(z: Tensor) -> Tensor:
    """The point of the simplex nearest to z (…, K)."""
    ordered, _ = torch.sort(z, descending=True)
    rank = torch.arange(1, z.shape[-1] + 1, device=z.device, dtype=z.dtype)
    excess = torch.cumsum(ordered, -1) - 1
    support = (rank * ordered > excess).sum(-1, keepdim=True)
    threshold = excess.gather(-1, support - 1) / support
    return torch.clamp(z - threshold, min=0)


def sparsestmax(z: Tensor, radius: Tensor) -> Tensor:
    """The point of the simplex nearest to z (…, K), at least ``radius`` from its middle; K = 2, 3.

    If sparsemax(z) is nearer to the middle it is pushed out to the circle of that radius; if it
    then leaves the simplex, along the side it left by. At the largest radius, that of the
    corners, the result has a single one. From the exact middle no direction is better than
    another, and the result stays there.
    """
    k = z.shape[-1]
    middle = 1 / k
    near = sparsemax(z)
    reach = near - middle
    tiny = 16 * torch.finfo(z.dtype).eps
    # rounding is no direction: of three equal weights it may be outside of the simplex
    rounding = reach.detach().abs().amax(-1, keepdim=True) <= tiny
    reach = torch.where(rounding, reach - reach.detach(), reach)
    far = middle + radius * _direction(reach)
    inside = far >= 0
    side = inside.to(z.dtype) / inside.sum(-1, keepdim=True)  # the middle of the side
    along = torch.where(inside, far - _sum(far * side), 0)
    rest = torch.clamp(radius.square() - _sum((side - middle).square()), min=0)
    pushed = side + torch.sqrt(rest) * _direction(along)
    far = torch.where(inside.all(-1, keepdim=True), far, pushed)
    found = torch.where(_sum(reach.square()) >= radius.square(), near, far)
    # rounding must neither keep the last weight from being a whole one, nor be a share itself
    at_corner = (radius >= corner_radius(k) * (1 - tiny)) & (reach != 0).any(-1, keepdim=True)
    largest = z.argmax(-1, keepdim=True)
    corner = (torch.arange(k, device=z.device) == largest).to(z.dtype)
    found = torch.where(at_corner, corner, torch.where(found > tiny, found, 0))
    return found / _sum(found)


def corner_radius(k: int) -> float:
    """How far the corners of the simplex of K weights are from its middle."""
    return math.sqrt((k - 1) / k)


def _direction(vector: Tensor) -> Tensor:
    """vector / ‖vector‖; zero, with a finite gradient, for the zero vector."""
    square = _sum(vector.square())
    safe = torch.where(square > 0, square, 1)
    return vector * torch.rsqrt(safe)


def _sum(vectors: Tensor) -> Tensor:
    return vectors.sum(-1, keepdim=True)
