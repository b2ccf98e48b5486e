"""gn: group normalization, statistics per sample and group of channels."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from normkit.core.card import Card
from normkit.core.fusion import Fusion, Pool
from normkit.core.groups import GroupPolicy, resolve_groups
from normkit.core.messages import title
from normkit.core.moments import Coefficients, Moments, spread
from normkit.core.statistics import LayerState
from normkit.errors import ShapeError
from normkit.layers.base import Normalizer


class GN(Normalizer):
    """Group normalization.

    Formula:
        y = weight · (x − mean) / √(var + eps) + bias

    Statistics: one mean and biased variance per sample and group of C / groups consecutive
    channels, over the group and all positions; the same in eval mode. No buffers.

    Shapes: (N, C, *spatial) or (N, C) to the same, any memory format.

    Use when: batches are small, as in detection and segmentation; with ``WS``, which was worth 15
    to 20 points in five epochs of CIFAR-10 (docs/evidence.md, l): alone it learns more slowly, and
    more slowly still without warm-up.
    Avoid when: a group holds one value, as one channel on a 1×1 map: its output is the bias.

    Paper: Wu & He 2018. The default takes 32 groups, or the greatest common divisor of that and
    the channels; a number given must divide, unless ``group_policy`` says how to bend it.

    from_batch_norm carries weight and bias; statistics then come from each sample, so the
    function changes: an approximation to start fine-tuning from.

    >>> import torch, normkit as nk
    >>> y = nk.GN(8, groups=4)(torch.randn(2, 8, 5, 5))
    >>> abs(y[0, :2].mean().item()) < 1e-5
    True
    """

    card = Card(
        name="gn",
        title="Group Normalization",
        paper="Wu & He 2018",
        same_in_eval=True,
        cures=("tiny-batch", "tiny-groups", "batch-dependent-eval", "shared-statistics"),
    )

    def __init__(
        self,
        channels: int,
        *,
        groups: int | None = None,
        group_policy: GroupPolicy = "error",
        **options: Any,
    ) -> None:
        super().__init__(channels, **options)
        self.group_policy = group_policy
        self.groups = resolve_groups(channels, groups, group_policy, owner=self._title)

    def coefficients(self, moments: Moments | None) -> Coefficients:
        assert moments is not None
        standardized = group_standardizing(moments, self.groups, self.eps)
        return standardized.then(self.weight, self.bias)

    def fusion(self, x: Tensor, state: LayerState) -> Fusion | None:
        return Pool("sample", self.eps, self.groups, self.weight, self.bias)

    def sample_groups(self) -> int:
        return self.groups

    def check_size(self, x: Tensor) -> None:
        check_group_size(x, self.groups, self)


def group_standardizing(moments: Moments, groups: int, eps: float) -> Coefficients:
    """The map that standardizes each group of channels of each sample."""
    n, channels = moments.mean.shape
    wide = channels // groups
    pooled = moments.pooled(channels=wide).standardizing(eps)
    return pooled.each(lambda table: spread(table, samples=n, groups_of=wide))


def check_group_size(x: Tensor, groups: int, layer: Normalizer) -> None:
    """One value in all is an error, as in torch.nn; in a larger batch such a group gives 0."""
    if x.numel() // groups == 1:
        raise ShapeError(
            f"{title(layer)} expects more than one value per group, got input {tuple(x.shape)} "
            f"with {groups} group(s). Try fewer groups."
        )
