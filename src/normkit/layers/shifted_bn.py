"""shifted_bn: batch normalization to predefined means and deviations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from normkit.core.card import Card
from normkit.core.moments import Moments
from normkit.core.statistics import LayerState, MapResult
from normkit.core.trained import TrainedBN
from normkit.errors import OptionError
from normkit.layers.batch import BatchNormalizer
from normkit.layers.measured import Refusal


class ShiftedBN(BatchNormalizer):
    """Batch normalization that keeps channels at fixed, drawn distances from each other.

    Formula:
        x̂ = (x − mean) / √(var + eps)
        y = weight · (target_std · x̂ + target_mean) + bias
        target_mean ~ N(0, mean_spread), target_std = exp(N(0, std_spread)), per channel

    Statistics: as bn. The targets are drawn once from ``seed`` and are buffers.

    Shapes: (N, C, *spatial) to the same.

    Use when: studying how far a network may stray towards elimination singularities: the
    experiment that shows why BN trains better than layer norm.
    Avoid when: anything else; spreads of 0 are plain bn.

    Paper: Qiao et al. (ws-bcn), eq. 33 and 34. The spreads are standard deviations; the paper
    does not say. Its σ̂ is called a variance there but used as a scale, as here.

    >>> import torch, normkit as nk
    >>> layer = nk.ShiftedBN(8, mean_spread=1.0, seed=3)
    >>> y = layer(torch.randn(16, 8, 5, 5))
    >>> torch.allclose(y.mean((0, 2, 3)), layer.target_mean, atol=1e-5)
    True
    """

    card = Card(
        name="shifted_bn",
        title="Batch Normalization to predefined statistics",
        paper="Qiao et al. 2019 (ws-bcn), eq. 33-34",
        pools_samples=True,
        exact_from_bn=True,
    )
    shares_map = True
    shared_buffers = BatchNormalizer.shared_buffers | {"target_mean", "target_std"}
    target_mean: Tensor
    target_std: Tensor

    def __init__(
        self,
        channels: int,
        *,
        mean_spread: float = 0.0,
        std_spread: float = 0.0,
        seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(channels, **options)
        if mean_spread < 0 or std_spread < 0:
            raise OptionError(
                f"ShiftedBN expects spreads ≥ 0, got {mean_spread!r} and {std_spread!r}."
            )
        self.mean_spread, self.std_spread, self.seed = mean_spread, std_spread, seed
        drawn = torch.Generator().manual_seed(seed)
        mean = torch.randn(channels, generator=drawn, dtype=torch.float64) * mean_spread
        std = torch.exp(torch.randn(channels, generator=drawn, dtype=torch.float64) * std_spread)
        like = self._statistic(0.0)
        self.register_buffer("target_mean", mean.to(like))
        self.register_buffer("target_std", std.to(like))

    def coefficients(self, moments: Moments | None, state: LayerState) -> MapResult:
        statistics, update = self.statistics(moments, state)
        targets = state["target_std"], state["target_mean"]
        targeted = statistics.standardizing(self.eps).then(*targets)
        return MapResult(targeted.then(self.weight, self.bias), update)

    def as_batch_norm(self, like: Tensor | None = None) -> TrainedBN:
        bn = super().as_batch_norm(like)
        if self.mean_spread == self.std_spread == 0:
            return bn
        weight, bias = bn.weight * self.target_std, bn.weight * self.target_mean + bn.bias
        return bn.having(weight=weight.to(bn.weight.dtype), bias=bias.to(bn.weight.dtype))

    def gamma(self) -> Tensor | Refusal | None:
        return self.target_std if self.weight is None else self.weight * self.target_std
