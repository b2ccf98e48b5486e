"""The feature condensation score: how alike the samples of a batch are."""

from __future__ import annotations

import torch
from torch import Tensor

from normkit.core.layout import Channels
from normkit.core.moments import Moments
from normkit.engine.normalize import dense


def condensation_score(x: Tensor, moments: Moments) -> Tensor:
    """Mean cosine between the samples of x over all ordered pairs; 1 for a single sample.

    With unit vectors u_n the pairs need not be formed: (‖Σ u_n‖² − n) / (n(n − 1)). The norms
    come from the moments, so this is one more read of x: O(nD). A zero sample has cosine 0 with
    every other. No gradient, no host synchronisation.
    """
    n = x.shape[0]
    if n == 1:
        return torch.ones((), device=x.device, dtype=moments.mean.dtype)
    with torch.no_grad():
        squares = (moments.var + moments.mean.square()).sum(1) * moments.count  # ‖x_n‖²
        weight = torch.where(squares > 0, squares.rsqrt(), 0)
        total = weighted_sum(x, weight)
        return (total.square().sum() - n) / (n * (n - 1))


def weighted_sum(x: Tensor, weight: Tensor) -> Tensor:
    """Σ_n weight[n] · x_n as one flat vector in the order of memory."""
    x = dense(x)
    flat = Channels(x).view(x).reshape(x.shape[0], -1)
    return torch.mv(flat.to(weight.dtype).mT, weight)
