"""Feature condensation: how alike the samples of a batch are."""

from __future__ import annotations

import torch
from torch import Tensor

from normkit.core.moments import Moments
from normkit.core.precision import without_autocast
from normkit.engine.torch.operations import condensation_score
from normkit.errors import ShapeError


def condensation(x: Tensor, samples: int | None = None) -> Tensor:
    """Mean cosine between the flattened samples of x over all pairs: a scalar, 1 for one sample.

    Of the first ``samples`` if given. A sample of zeros has cosine 0 with every other and, as in
    the layer ubn, lowers the score by 1 / (n(n − 1)) besides.

    Paper: Wang et al. 2024 (ubn); above 0.3 its figures call features condensed.
    """
    flat = _flat(x, samples)
    with without_autocast(x.device):
        return condensation_score(flat, Moments(flat, torch.zeros_like(flat), 1))


def condensation_matrix(x: Tensor, samples: int | None = None) -> Tensor:
    """The cosines between all samples, (n, n): what the score is the mean of, off the diagonal."""
    flat = _flat(x, samples)
    norm = flat.norm(dim=1, keepdim=True)
    unit = torch.where(norm > 0, flat / norm, 0)
    with without_autocast(x.device):
        return unit @ unit.mT


def _flat(x: Tensor, samples: int | None) -> Tensor:
    if x.dim() < 2 or x.shape[0] == 0:
        raise ShapeError(f"Condensation is of a batch (N, …) with N ≥ 1, got {tuple(x.shape)}.")
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.detach()[:samples].flatten(1).to(wide)
