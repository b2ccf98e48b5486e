"""dyt: dynamic tanh, a layer in the place of a normalizer that has no statistics at all."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from normkit.core.card import Card
from normkit.core.precision import statistics_dtype
from normkit.core.trained import TrainedBN
from normkit.layers.base import Normalizer


class DyT(Normalizer):
    """Dynamic tanh: squashes each value instead of normalizing it.

    Formula:
        y = weight · tanh(alpha · x) + bias

    Statistics: none; alpha is one learned number. The same in eval mode. No buffers.

    Shapes: (N, C, *spatial) or (N, C) to the same.

    Use when: no value may depend on any other, as in some transformers, at any batch size.
    Avoid when: a trained batch norm is to be carried over: its scale and shift are, but tanh
    knows nothing of its statistics.

    Paper: Zhu et al. 2025. ``alpha_init`` is their default for everything but language models.

    from_batch_norm carries weight and bias; alpha starts anew.

    >>> import torch, normkit as nk
    >>> y = nk.DyT(8)(100 * torch.randn(2, 8, 5, 5))
    >>> bool(y.abs().max() <= 1)
    True
    """

    card = Card(
        name="dyt",
        title="Dynamic Tanh",
        paper="Zhu et al. 2025",
        family=False,
        statistics="none",
        same_in_eval=True,
    )

    has_eps = False

    def __init__(self, channels: int, *, alpha_init: float = 0.5, **options: Any) -> None:
        super().__init__(channels, **options)
        self.alpha_init = self._number("alpha_init", alpha_init)
        self.alpha = self._new(alpha_init, 1)

    def uses_moments(self) -> bool:
        return False

    def normalize(self, x: Tensor, residual: Tensor | None, activation: str) -> Tensor:
        wide = statistics_dtype(torch.promote_types(x.dtype, self.alpha.dtype))
        y = torch.tanh(self.alpha.to(wide) * x.to(wide)).to(x.dtype)
        return self.finish(y, residual, activation)

    @classmethod
    def options_from(cls, bn: TrainedBN, asked: dict[str, Any]) -> dict[str, Any]:
        return {"affine": bn.affine}  # nothing is divided, so that eps means nothing
