"""ibn: instance and batch normalization side by side."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from normkit.core.card import Card
from normkit.core.messages import title
from normkit.core.moments import Coefficients, Moments
from normkit.core.statistics import LayerState, MapResult
from normkit.core.trained import TrainedBN
from normkit.errors import OptionError, ShapeError
from normkit.layers.batch import BatchNormalizer
from normkit.layers.measured import Refusal


class IBN(BatchNormalizer):
    """The layer of IBN-Net: the first channels by instance norm, the others by batch norm.

    Formula:
        y = weight · (x − mean) / √(var + eps) + bias

    Statistics: for the first int(ratio · C) channels per sample and channel, over positions;
    for the others as bn. Only those have running statistics.

    Shapes: (N, C, *spatial) to the same; more than one position unless ratio is 0.

    Use when: training and test images differ in style, in the first norm of early blocks.
    Avoid when: the network's last stage: there appearance is gone already.

    Paper: Pan et al. 2018 (IBN-a). Their split fails for any ratio but one half; ours is by
    size. weight and bias are one table for both parts. IBN-b is a placement of ``in``, not a layer.

    from_batch_norm is exact for the batch part; the instance part keeps weight and bias.

    >>> import torch, normkit as nk
    >>> layer = nk.IBN(8, ratio=0.25)
    >>> layer.running_mean.shape
    torch.Size([6])
    """

    card = Card(name="ibn", title="IBN-a", paper="Pan et al. 2018 (IBN-Net)", pools_samples=True)
    plain_statistics = False

    def __init__(self, channels: int, *, ratio: float = 0.5, **options: Any) -> None:
        channels = self._positive("channels", channels)
        if not 0 <= ratio <= 1:
            raise OptionError(f"IBN expects a ratio between 0 and 1, got {ratio!r}.")
        self.ratio = ratio
        self.split = int(channels * ratio)
        super().__init__(channels, **options)

    def statistics_size(self) -> int:
        return self.channels - self.split

    def can_synchronise(self) -> bool:
        return self.split < self.channels

    def uses_moments(self) -> bool:
        return self.split > 0 or self.uses_batch()

    def check_size(self, x: Tensor) -> None:
        if self.split and x[0, 0].numel() == 1:
            raise ShapeError(
                f"{title(self)} expects more than one position per channel for its instance "
                f"part, got input {tuple(x.shape)}. Try ratio=0 or bn."
            )

    def coefficients(self, moments: Moments | None, state: LayerState) -> MapResult:
        if moments is None or self.split == 0:
            statistics, update = self.statistics(moments, state)
            map = statistics.standardizing(self.eps)
            return MapResult(map.then(self.weight, self.bias), update)
        mean, var, k = moments.mean, moments.var, self.split
        if k == self.channels:
            return MapResult(moments.standardizing(self.eps).then(self.weight, self.bias))
        batch, update = self.statistics(Moments(mean[:, k:], var[:, k:], moments.count), state)
        map = self._joined(mean, var, batch).standardizing(self.eps)
        return MapResult(map.then(self.weight, self.bias), update)

    def _joined(self, mean: Tensor, var: Tensor, batch: Moments) -> Moments:
        """The sample's own statistics of the first channels beside those of the batch."""
        k, rows = self.split, mean.shape[0]
        means = torch.cat([mean[:, :k], batch.mean.expand(rows, -1)], 1)
        return Moments(means, torch.cat([var[:, :k], batch.var.expand(rows, -1)], 1), 1)

    def sample_statistics(self, moments: Moments, x: Tensor) -> Moments:
        k = self.split
        return Moments(moments.mean[:, k:], moments.var[:, k:], moments.count)

    def statistics_from(self, bn: TrainedBN) -> tuple[Tensor, Tensor]:
        return bn.mean[self.split :], bn.var[self.split :]

    def channel_statistics(self) -> tuple[Tensor, Tensor] | None:
        kept = super().channel_statistics()
        if kept is None or self.split == 0:
            return kept
        mean, var = kept
        own = mean.new_zeros(self.split), var.new_ones(self.split)
        return torch.cat([own[0], mean]), torch.cat([own[1], var])

    def as_batch_norm(self, like: Tensor | None = None) -> TrainedBN:
        bn = super().as_batch_norm(like)
        return bn.losing("instance part") if bn.tracked and self.split else bn

    def standardizing(self, table: Moments, *, batch: bool) -> Coefficients | Refusal:
        mean, var, k = table.mean, table.var, self.split
        own = Moments(mean[:, :k], var[:, :k], table.count).standardizing(self.eps)
        rest = super().standardizing(Moments(mean[:, k:], var[:, k:], table.count), batch=batch)
        assert not isinstance(rest, Refusal)
        both = zip(own.flat(), rest.flat(), strict=True)
        return Coefficients(*(torch.cat([a, b.expand(len(a), -1)], 1) for a, b in both))
