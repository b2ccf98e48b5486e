"""rms: root mean square normalization of feature maps."""

from __future__ import annotations

import torch
from torch import Tensor

from normkit.core.card import Card
from normkit.core.moments import Coefficients, Moments
from normkit.layers.base import Normalizer
from normkit.layers.measured import Refusal, grouped


class RMS(Normalizer):
    """Root mean square normalization: layer normalization that does not subtract the mean.

    Formula:
        y = weight · x / √(mean of x² + eps) + bias

    Statistics: one mean square per sample, over all channels and positions; the same in eval
    mode. No buffers.

    Shapes: (N, C, *spatial) or (N, C) to the same.

    Use when: ln is wanted with one statistic less, or features whose sign and zero mean something.
    Avoid when: you want nn.RMSNorm of tokens, which normalizes each position over its channels.

    Paper: Zhang & Sennrich 2019, there for vectors, on which the two agree. The published layer
    has no bias; ours has one, so that a batch norm can be carried over: it starts at zero.

    from_batch_norm carries weight and bias; the scale then comes from each sample.

    >>> import torch, normkit as nk
    >>> y = nk.RMS(8)(3 * torch.randn(2, 8, 5, 5) + 1)
    >>> round(y[0].square().mean().item(), 3)
    1.0
    """

    card = Card(
        name="rms",
        title="Root Mean Square Normalization",
        paper="Zhang & Sennrich 2019",
        same_in_eval=True,
        aliases=("rmsnorm",),
    )

    def coefficients(self, moments: Moments | None) -> Coefficients:
        assert moments is not None
        return self._divided(moments).then(self.weight, self.bias)

    def _divided(self, moments: Moments) -> Coefficients:
        square = (moments.var + moments.mean.square()).mean(1, keepdim=True)  # (N, 1)
        return Coefficients(torch.rsqrt(square + self.eps).expand_as(moments.mean))

    # ---------------------------------------------------------------- for diagnosis

    def sample_groups(self) -> int:
        return 1

    def divided_by(self, moments: Moments) -> Tensor | Refusal:
        pooled = grouped(moments, 1)
        return pooled.var[0] + pooled.mean[0].square()

    def standardizing(self, table: Moments, *, batch: bool) -> Coefficients | Refusal:
        return self._divided(table)
