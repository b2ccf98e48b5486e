"""iebn: instance enhancement batch normalization, gated by the raw means of each sample."""

from __future__ import annotations

from normkit.core.card import Card
from normkit.core.moments import Moments
from normkit.core.statistics import LayerState, MapResult
from normkit.layers.gated import Gated, gate


class IEBN(Gated):
    """Instance enhancement batch normalization: bn, scaled by a gate of each sample's raw mean.

    Formula, with m the mean over positions of each sample and channel of the raw input:
        s = sigmoid(gate_weight · m(x) + gate_bias)
        y = weight · s · (x − mean) / √(var + eps) + bias
        minus: s = sigmoid(gate_bias)

    Statistics: as bn; the gate is of the sample at hand in both modes.

    Shapes: (N, C, *spatial) to the same.

    Use when: bn works and a little instance information may help.
    Avoid when: inputs are far from unit scale: raw means saturate the gate.

    Paper: Liang et al. 2019; ``minus`` is the ablation of revisiting-bn. Unlike rbn the gate
    sees the input before normalization, and it starts at sigmoid(−1).

    >>> import torch, normkit as nk
    >>> layer = nk.IEBN(8)
    >>> y = layer(torch.randn(16, 8, 5, 5))
    >>> round(y.std(correction=0).item(), 3)  # sigmoid(−1) at the start
    0.269
    """

    card = Card(
        name="iebn",
        title="Instance Enhancement Batch Normalization",
        paper="Liang et al. 2019; Davis & Frank 2021 (revisiting-bn) for the minus form",
        pools_samples=True,
        exact_from_bn=True,
    )
    gate_start = -1.0
    looks_at = "input"
    fusion = Gated.fusion  # which describes the coefficients below

    def coefficients(self, moments: Moments | None, state: LayerState) -> MapResult:
        assert moments is not None
        s = gate(moments.mean, self.gate_weight, self.gate_bias)
        statistics, update = self.statistics(moments, state)
        gated = statistics.standardizing(self.eps).then(s, None)
        return MapResult(gated.then(self.weight, self.bias), update, s)
