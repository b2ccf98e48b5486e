"""ln: layer normalization of feature maps."""

from __future__ import annotations

from torch import Tensor

from normkit.core.card import Card
from normkit.core.fusion import Fusion, Pool
from normkit.core.moments import Coefficients, Moments
from normkit.core.statistics import LayerState
from normkit.layers.base import Normalizer
from normkit.layers.gn import check_group_size, group_standardizing


class LN(Normalizer):
    """Layer normalization of feature maps: one group, with an affine map per channel.

    Formula:
        y = weight · (x − mean) / √(var + eps) + bias

    Statistics: one mean and biased variance per sample, over all channels and positions; the
    same in eval mode. No buffers.

    Shapes: (N, C, *spatial) or (N, C) to the same.

    Use when: the baseline of the five papers is wanted: gn with one group.
    Avoid when: you want nn.LayerNorm([C, H, W]), whose affine map is per element, or the
    normalization of each pixel over channels, which is pn.

    Paper: Ba, Kiros & Hinton 2016, in the form all five papers compare with.

    from_batch_norm carries weight and bias; statistics then come from each sample.

    >>> import torch, normkit as nk
    >>> y = nk.LN(8)(torch.randn(2, 8, 5, 5))
    >>> abs(y[0].mean().item()) < 1e-5
    True
    """

    card = Card(
        name="ln", title="Layer Normalization", paper="Ba, Kiros & Hinton 2016", same_in_eval=True
    )

    def coefficients(self, moments: Moments | None) -> Coefficients:
        assert moments is not None
        return group_standardizing(moments, 1, self.eps).then(self.weight, self.bias)

    def fusion(self, x: Tensor, state: LayerState) -> Fusion | None:
        return Pool("sample", self.eps, 1, self.weight, self.bias)

    def sample_groups(self) -> int:
        return 1

    def check_size(self, x: Tensor) -> None:
        check_group_size(x, 1, self)
