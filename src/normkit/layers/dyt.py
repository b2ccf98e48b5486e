"""dyt: dynamic tanh, a layer in the place of a normalizer that has no statistics at all."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from normkit.core.card import Card
from normkit.core.fusion import Fusion, Squash
from normkit.core.layout import Layout, dense, shared_by_samples
from normkit.core.precision import statistics_dtype
from normkit.core.statistics import LayerState
from normkit.core.trained import TrainedBN
from normkit.engine.dispatch import decide
from normkit.layers.base import Normalizer

STRAIGHT = 0.02  # of the variance that a fit wants, what tanh may take away
POWERS = (-10, 3)  # of two, alpha times the size of the inputs: the least, and above the largest
ROWS = 1 << 11  # values of a channel by which a fit chooses alpha


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

    from_batch_norm carries weight and bias; alpha starts anew, and a fitted conversion chooses it.

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

    def cells(self, x: Tensor) -> Layout:
        return shared_by_samples(x)

    def fusion(self, x: Tensor, state: LayerState) -> Fusion | None:
        return Squash(self.alpha, self.weight, self.bias)

    def normalize(self, x: Tensor, residual: Tensor | None, activation: str) -> Tensor:
        x, state = dense(x), self.state()
        squash = self.description(x, state)
        path = decide(x, self.cells(x), squash, fixed=True)
        if path.name == "fused":
            return self.run(path, x, state, squash, residual, activation)[0]
        if path.name == "loops":
            y = self.in_loops(path, x, state, squash, residual, activation)
            if y is not None:
                return y
        wide = statistics_dtype(torch.promote_types(x.dtype, self.alpha.dtype))
        y = torch.tanh(self.alpha.to(wide) * x.to(wide)).to(x.dtype)
        return self.finish(y, residual, activation)

    @torch.no_grad()
    def prepare_fit(self, x: Tensor, wanted: Tensor) -> tuple[str, ...]:
        """The largest alpha, of powers of two, whose tanh still leaves a line to what is wanted: a
        smaller one would fit better, but the smaller it is, the less the layer is but a line."""
        every = -(-len(x) // ROWS)
        x, wanted = x[::every], wanted[::every]
        target = wanted - wanted.mean(0)
        size = x.square().mean().sqrt().clamp(min=torch.finfo(x.dtype).tiny)
        power = target.square().sum()

        def straight(power_of_two: int) -> bool:
            y = torch.tanh(2.0**power_of_two / size * x)
            y = y - y.mean(0)
            scale = (y * target).sum(0) / y.square().sum(0).clamp(min=torch.finfo(x.dtype).tiny)
            return bool((target - scale * y).square().sum() <= STRAIGHT * power)

        least, above = POWERS  # the smaller, the straighter: halve the range
        while above - least > 1:
            middle = (least + above) // 2
            least, above = (middle, above) if straight(middle) else (least, middle)
        alpha = 2.0**least / size
        self.alpha.fill_(float(alpha))
        return ("alpha",)

    @classmethod
    def options_from(cls, bn: TrainedBN, asked: dict[str, Any]) -> dict[str, Any]:
        return {"affine": bn.affine}  # nothing is divided, so that eps means nothing
