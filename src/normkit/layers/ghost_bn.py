"""ghost_bn: batch normalization over runs of samples inside the batch."""

from __future__ import annotations

from typing import Any

from normkit.core.card import Card
from normkit.layers.bn import BN


class GhostBN(BN):
    """Batch normalization as a worker with ``virtual_batch`` images would compute it.

    Formula:
        y = weight · (x − mean_r) / √(var_r + eps) + bias, for the samples of run r

    Statistics: one mean and variance per channel and run of ``virtual_batch`` consecutive
    samples, over those samples and all positions; the last run may be shorter. The running
    statistics get the average over runs, each weighted by its samples: what the buffers of all
    workers would be on average. Eval mode uses the running statistics.

    Shapes: (N, C, *spatial) to the same.

    Use when: large batches generalize worse, or small-batch statistics are to be studied.
    Avoid when: the last run would hold a single value per channel; that is an error.

    Paper: Hoffer et al. 2017 (ghost batches); the per-worker statistics of bgn and ws-bcn.
    The same as bn with virtual_batch; every layer that pools over samples has that option.

    >>> import torch, normkit as nk
    >>> x = torch.randn(8, 4, 3, 3)
    >>> halves = [nk.BN(4)(half) for half in x.split(4)]
    >>> torch.allclose(nk.GhostBN(4, virtual_batch=4)(x), torch.cat(halves), atol=1e-6)
    True
    """

    card = Card(
        name="ghost_bn",
        title="Ghost Batch Normalization",
        paper="Hoffer, Hubara & Soudry 2017",
        pools_samples=True,
        exact_from_bn=True,
    )

    def __init__(self, channels: int, *, virtual_batch: int = 32, **options: Any) -> None:
        super().__init__(channels, virtual_batch=virtual_batch, **options)
