"""bn: batch normalization, with a start scale below one and the two alternative affine forms."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from normkit.core.card import Card
from normkit.core.fusion import Fixed, Fusion, Pool
from normkit.core.moments import Coefficients, Moments
from normkit.core.statistics import LayerState, MapResult
from normkit.core.trained import ParameterRole, TrainedBN
from normkit.layers.batch import BatchNormalizer
from normkit.layers.measured import Refusal


class BN(BatchNormalizer):
    """Batch normalization; with ``scale_init`` below one, the method of revisiting-bn.

    Formula:
        x̂ = (x − mean) / √(var + eps)
        standard   y = weight · x̂ + bias
        a1         y = weight · (x̂ + bias)
        a2         y = weight · (inner_weight · x̂ + bias)

    Statistics: one mean and variance per channel, over samples and positions; eval mode uses
    running ones. The batch is normalized with the biased variance, the running one is unbiased.

    Shapes: (N, C, *spatial) or (N, C), any memory format, to the same.

    Use when: batches of 16 and more per worker. Warm the learning rate up: an epoch of it was worth
    5 points in a ResNet-18, 12 in one of bottlenecks and under 1 in a ResNet-20 (docs/evidence.md,
    l and j). ``scale_init=0.1`` with weight at a hundredth of the learning rate is the recipe of
    revisiting-bn: it cost the ResNet-20 4 to 9 points, and gained 6 in a ResNet-18 without warm-up
    alone (a).
    Avoid when: fewer than about 8 samples share statistics, or training and test data differ.

    Paper: Ioffe & Szegedy 2015; forms a1 and a2 are eq. 26 and 27 of Davis & Frank, "Revisiting
    Batch Normalization". We depart in nothing; a scale_init of 0 or less is taken as given,
    where the authors' code turns it into 1.

    >>> import torch, normkit as nk
    >>> layer = nk.BN(8, scale_init=0.1)
    >>> y = layer(torch.randn(4, 8, 5, 5))
    >>> round(y.std(correction=0).item(), 2)
    0.1
    """

    card = Card(
        name="bn",
        title="Batch Normalization",
        paper="Ioffe & Szegedy 2015; Davis & Frank 2021 (revisiting-bn) for scale_init, a1, a2",
        pools_samples=True,
        exact_from_bn=True,
        cures=("double-update", "frozen-at-start"),
    )
    shares_map = True
    inner_weight: Tensor | None

    def __init__(self, channels: int, *, form: str = "standard", **options: Any) -> None:
        super().__init__(channels, **options)
        self.form = self._choice("form", form, ("standard", "a1", "a2"))
        inner = form == "a2" and self.affine
        self.register_parameter("inner_weight", self._new(1.0) if inner else None)

    def coefficients(self, moments: Moments | None, state: LayerState) -> MapResult:
        statistics, update = self.statistics(moments, state)
        return MapResult(self.affine_map(statistics.standardizing(self.eps)), update)

    def fusion(self, x: Tensor, state: LayerState) -> Fusion | None:
        if self.form != "standard":
            return None
        if not self.pools_all(x):
            return running_map(self, self.channels, self.weight, self.bias)
        memory = self.memory(x.numel() // self.channels, state)
        return Pool("batch", self.eps, self.channels, self.weight, self.bias, memory)

    def affine_map(self, standardized: Coefficients) -> Coefficients:
        """The learned scale and shift, in the chosen form."""
        if self.form == "standard":
            return standardized.then(self.weight, self.bias)
        return standardized.then(self.inner_weight, self.bias).then(self.weight, None)

    def affine_from(self, bn: TrainedBN) -> tuple[Tensor, Tensor]:
        if self.form == "standard":
            return bn.weight, bn.bias
        # weight · (x̂ + bias / weight); where the weight is zero the bias cannot be carried
        return bn.weight, (bn.bias / bn.weight).nan_to_num(0.0, 0.0, 0.0)

    def with_output_map(self, scale: Tensor, shift: Tensor) -> dict[str, Tensor] | Refusal:
        if self.form == "standard" or self.weight is None or self.bias is None:
            return super().with_output_map(scale, shift)
        weight, bias = (t.detach().to(scale.dtype) for t in (self.weight, self.bias))
        outer = weight * scale  # weight · (x̂ + bias): the shift is divided by the new weight
        return {"weight": outer, "bias": bias + (shift / outer).nan_to_num(0.0, 0.0, 0.0)}

    def as_batch_norm(self, like: Tensor | None = None) -> TrainedBN:
        bn = super().as_batch_norm(like)
        if self.form == "standard" or not bn.affine:
            return bn
        inner = 1.0 if self.inner_weight is None else self.inner_weight.detach()
        return bn.having(weight=bn.weight * inner, bias=bn.weight * bn.bias)

    def parameter_role(self, name: str) -> ParameterRole:
        role = super().parameter_role(name)
        return role if self.form == "standard" else role._replace(of_batch_norm=False)

    def gamma(self) -> Tensor | Refusal | None:
        inner = self.inner_weight
        return self.weight if inner is None or self.weight is None else self.weight * inner


def running_map(
    layer: BatchNormalizer, groups: int, weight: Tensor | None, bias: Tensor | None
) -> Fixed | None:
    """The map of a layer's running statistics, where these normalize."""
    mean, var = layer._buffers["running_mean"], layer._buffers["running_var"]
    if layer.uses_batch() or layer.domains is not None or mean is None or var is None:
        return None
    return Fixed(layer.eps, groups, mean, var, weight, bias)
