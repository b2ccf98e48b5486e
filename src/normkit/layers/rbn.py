"""rbn: representative batch normalization, calibrated by each sample's own means."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from normkit.core.card import Card
from normkit.core.moments import Moments
from normkit.core.statistics import LayerState, MapResult
from normkit.layers.gated import Gated, centered, centered_by, gate


class RBN(Gated):
    """Representative batch normalization: centering and scaling calibrated per sample.

    Formula, with m the mean over positions of each sample and channel:
        x' = x + center_weight · m
        x̂ = (x' − mean') / √(var' + eps)
        s = sigmoid(gate_weight · m(x̂) + gate_bias)
        y = weight · s · x̂ + bias
        minus: s = sigmoid(gate_bias), no centering

    Statistics: one mean and variance of x' per channel, over samples and positions; eval mode
    uses running ones. The gate is of the sample at hand in both modes.

    Shapes: (N, C, *spatial) to the same. On 1×1 maps the gate is pointwise.

    Use when: samples of a batch differ in style or contrast and the batch is large enough for bn.
    Avoid when: one sample a batch: then m(x̂) is zero and the gate cannot act.

    Paper: Gao et al. 2021. ``centering=False`` is the form compared in revisiting-bn; ``minus``
    is its ablation. Our centering leaves the input alone where the authors' code changes it in
    place; our parameters have shape (C,) for every rank of input.

    >>> import torch, normkit as nk
    >>> layer = nk.RBN(8)
    >>> y = layer(torch.randn(16, 8, 5, 5))
    >>> round(y.std(correction=0).item(), 3)  # sigmoid(1) at the start
    0.731
    """

    card = Card(
        name="rbn",
        title="Representative Batch Normalization",
        paper="Gao et al. 2021; Davis & Frank 2021 (revisiting-bn) for the minus form",
        pools_samples=True,
        exact_from_bn=True,
    )
    plain_statistics = False  # those of the centered input
    center_weight: Tensor | None
    gate_start = 1.0
    looks_at = "normalized"
    fusion = Gated.fusion  # which describes the coefficients below

    def __init__(self, channels: int, *, centering: bool = True, **options: Any) -> None:
        super().__init__(channels, **options)
        self.centering = centering
        wanted = centering and not self.minus
        self.register_parameter("center_weight", self._new(0.0) if wanted else None)

    def sample_statistics(self, moments: Moments, x: Tensor) -> Moments:
        return centered_by(moments, self.center_weight)

    def coefficients(self, moments: Moments | None, state: LayerState) -> MapResult:
        assert moments is not None
        calibrated, added = centered(moments, self.center_weight)
        statistics, update = self.statistics(calibrated, state)
        standardized = statistics.standardizing(self.eps)
        s = gate(standardized.of(calibrated.mean), self.gate_weight, self.gate_bias)
        gated = standardized.after_adding(added).then(s, None)
        return MapResult(gated.then(self.weight, self.bias), update, s)
