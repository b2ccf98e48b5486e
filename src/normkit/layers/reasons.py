"""Which backend a layer runs on."""

from __future__ import annotations

from torch import Tensor

from normkit.engine.backends import reason
from normkit.engine.normalize import dense
from normkit.layers.base import Normalizer


def why(layer: Normalizer, x: Tensor) -> str:
    """Says which backend would run for an input, and what keeps the other from it.

    >>> import torch, normkit as nk
    >>> nk.why(nk.BN(8), torch.randn(2, 8, 4, 4))
    'bn runs on torch, because the tensor is on cpu.'
    """
    layer.check(x)
    x = dense(x)
    return f"{layer.card.name} runs on {reason(x, *layer.layouts(x))}"
