"""in: instance normalization, statistics per sample and channel."""

from __future__ import annotations

from torch import Tensor

from normkit.core.card import Card
from normkit.core.fusion import Fusion, Pool
from normkit.core.messages import title
from normkit.core.moments import Coefficients, Moments
from normkit.core.statistics import LayerState
from normkit.errors import ShapeError
from normkit.layers.base import Normalizer


class IN(Normalizer):
    """Instance normalization.

    Formula:
        y = weight · (x − mean) / √(var + eps) + bias

    Statistics: one mean and biased variance per sample and channel, over positions; the same
    in eval mode. No buffers.

    Shapes: (N, C, *spatial) with more than one position to the same.

    Use when: the style of single images must not matter, as in style transfer.
    Avoid when: maps are 1×1: one value has no variance, and that is an error.

    Paper: Ulyanov, Vedaldi & Lempitsky 2016. With an affine map by default, as the papers
    compare; nn.InstanceNorm2d and the code of estimation-shift have none: affine=False.

    from_batch_norm carries weight and bias; statistics then come from each sample.

    >>> import torch, normkit as nk
    >>> y = nk.IN(8)(torch.randn(2, 8, 5, 5))
    >>> abs(y[0, 0].mean().item()) < 1e-5
    True
    """

    card = Card(
        name="in",
        title="Instance Normalization",
        paper="Ulyanov, Vedaldi & Lempitsky 2016",
        same_in_eval=True,
    )

    def coefficients(self, moments: Moments | None) -> Coefficients:
        assert moments is not None
        return moments.standardizing(self.eps).then(self.weight, self.bias)

    def fusion(self, x: Tensor, state: LayerState) -> Fusion | None:
        return Pool("sample", self.eps, self.channels, self.weight, self.bias)

    def sample_groups(self) -> int:
        return self.channels

    def check_size(self, x: Tensor) -> None:
        if x[0, 0].numel() == 1:
            raise ShapeError(
                f"{title(self)} expects more than one position per channel, "
                f"got input {tuple(x.shape)}. Try ln or bn."
            )
