"""Differences between channels that are normalized together."""

from __future__ import annotations

from torch import Tensor

from normkit.core.moments import Moments
from normkit.diagnosis.measures.shift import mean_and_var
from normkit.errors import ShapeError


def stat_diff(mean: Tensor, var: Tensor, groups: int = 1) -> Tensor:
    """Per group: std of the channels' means over the mean of their stds, (G,). 0 / 0 is 0.

    0 for channels that are alike; large if a few of them decide the statistics of all. ``mean``
    and ``var`` are per channel, of what the norm is given; a layer's value is the mean over its
    groups.

    Paper: Qiao et al. 2019 (ws-bcn), eq. 35; running variances there are read as their roots.
    """
    means, stds = _grouped(mean, var, groups)
    spread, scale = means.var(1, correction=0).sqrt(), stds.mean(1)
    return (spread / scale).masked_fill(spread == 0, 0.0)


def under_represented(
    mean: Tensor, var: Tensor, groups: int = 1, *, least: float = 0.1, reach: float = 3.0
) -> Tensor:
    """Which channels their group drowns, a boolean (C,); the mean of it is their share.

    Once the group is standardized as one, a channel is under-represented if its own std is below
    ``least``, where 1 is that of the group, or if its mean lies more than ``reach`` of its stds
    below 0, so that a ReLU hardly ever lets it pass. The paper (ws-bcn, section 6.1) describes
    both and gives no numbers.
    """
    means, stds = _grouped(mean, var, groups)
    each = Moments(means.reshape(1, -1), stds.square().reshape(1, -1), 1)
    group = each.pooled(channels=means.shape[1])
    center, scale = group.mean.reshape(-1, 1), group.var.sqrt().reshape(-1, 1)
    weak = stds < least * scale
    off = means - center + reach * stds < 0
    return (weak | off).flatten()


def _grouped(mean: Tensor, var: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Means and stds (G, C/G) in float64."""
    mean, var = mean_and_var((mean, var))
    if mean.shape != var.shape or groups < 1 or mean.numel() % groups:
        raise ShapeError(
            f"Means and variances (C,) expected with C divisible by groups={groups}, "
            f"got {tuple(mean.shape)} and {tuple(var.shape)}."
        )
    return mean.reshape(groups, -1), var.clamp(min=0).sqrt().reshape(groups, -1)
