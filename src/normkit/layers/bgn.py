"""bgn: batch group normalization, statistics over the batch and any number of groups."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from normkit.core.card import Card
from normkit.core.fusion import Fusion, Pool
from normkit.core.groups import largest_divisor, resolve_groups
from normkit.core.layout import Channels, Layout, Pieces, dense
from normkit.core.messages import title
from normkit.core.moments import Coefficients, Moments
from normkit.core.pieces import Cut, cut
from normkit.core.statistics import LayerState, MapResult, StateUpdate
from normkit.core.trained import TrainedBN
from normkit.engine import plain
from normkit.errors import ShapeError
from normkit.layers.batch import BatchNormalizer
from normkit.layers.bn import running_map
from normkit.layers.measured import OWN_STATISTICS, Refusal, grouped

CUT = Refusal("its groups are parts of channels")


class BGN(BatchNormalizer):
    """Batch group normalization.

    Formula, with the D = C·H·W values of a sample, in that order, cut into ``groups`` runs:
        y = weight · (x − mean_g) / √(var_g + eps) + bias, weight and bias per channel

    Statistics: one mean and variance per group, over the batch and the values of the group;
    eval mode uses running ones, tables (groups,). groups = C is bn; fewer pool whole channels;
    more cut each channel into strips of consecutive positions, so the map depends on position;
    groups = 1 is one mean and variance for the whole layer.

    Shapes: (N, C, *spatial) with groups ≤ C·H·W to the same; sizes may vary.

    Use when: batches of 2 to 128 a worker: few groups for small batches, many for large ones
    (the paper's table for ResNet-50: 2 → 1, 4 → 2, 8 → 16, 16 → 64, 32 → 128, 64 → 256,
    128 → 512). Warm the learning rate up: with one or two images a worker an epoch of it was worth
    11 to 12 points in a ResNet-20 (docs/evidence.md, m).
    Avoid when: groups cut channels unevenly and speed matters: that takes the general path; and
    with one or two images a worker, where gn or bcn with ``WS`` were better by 14 points and more
    (m). The numbers are for maps of a ResNet-50: fewer for smaller ones.

    Paper: Zhou et al. 2020. Its S = M/G is a misprint for D/G; eps, momentum and uneven groups
    are not stated. ``remainder="balanced"`` puts value d into group ⌊d·G/D⌋, so sizes differ by
    at most one; "error" refuses; "largest_divisor" lowers groups to whole channels or equal
    numbers of strips.

    from_batch_norm takes groups = C unless told otherwise, and is then exact; with fewer groups
    it pools the channels' running statistics.

    >>> import torch, normkit as nk
    >>> x = torch.randn(4, 8, 5, 5)
    >>> torch.allclose(nk.BGN(8, groups=8)(x), nk.BN(8)(x), atol=1e-5)
    True
    """

    card = Card(
        name="bgn",
        title="Batch Group Normalization",
        paper="Zhou et al. 2020 (bgn)",
        pools_samples=True,
        exact_from_bn=True,
    )
    plain_statistics = False
    shares_map = True

    def __init__(
        self,
        channels: int,
        *,
        groups: int | None = None,
        remainder: str = "balanced",
        **options: Any,
    ) -> None:
        channels = self._positive("channels", channels)
        self.remainder = remainder
        if groups is None:
            self.groups = resolve_groups(channels, None, owner="BGN")
        else:
            self.groups = groups = self._positive("groups", groups)
            if remainder == "largest_divisor":
                fewer = groups <= channels
                self.groups = (
                    largest_divisor(channels, groups) if fewer else groups - groups % channels
                )
        super().__init__(channels, **options)
        self._choice("remainder", remainder, ("balanced", "error", "largest_divisor"))

    def statistics_size(self) -> int:
        return self.groups

    def check_size(self, x: Tensor) -> None:
        total = x[0].numel()
        if self.groups > total:
            raise ShapeError(
                f"{title(self)} has {self.groups} groups, but a sample {tuple(x.shape[1:])} has "
                f"only {total} values. Try groups={min(self.channels, total)}."
            )
        if self.remainder != "balanced" and total % self.groups:
            raise ShapeError(
                f"{title(self)} with remainder={self.remainder!r} expects the {total} values of "
                f"a sample {tuple(x.shape[1:])} to divide into {self.groups} groups. "
                'Try remainder="balanced".'
            )

    def masks_refused(self) -> str:
        if self.channels % self.groups == 0:
            return ""
        return (
            f"its {self.groups} groups cut {self.channels} channels by position, and padding moves "
            "the cuts. Try groups that divide the channels"
        )

    # Three ways to cut: whole channels, equal strips of channels, or uneven pieces of them.

    def strips(self, positions: int) -> int | None:
        """Into how many equal strips each channel is cut; None if the cut is uneven."""
        if self.channels % self.groups == 0:
            return 1
        strips, rest = divmod(self.groups, self.channels)
        return None if rest or positions % strips else strips

    def division(self, x: Tensor) -> tuple[int, Cut | None]:
        """Strips a channel, and the pieces if the cut is uneven."""
        positions = math.prod(x.shape[2:])
        strips = self.strips(positions)
        if strips is None:
            return 1, cut(self.channels, positions, self.groups, x.device)
        return strips, None

    def cells(self, x: Tensor) -> Layout:
        strips, pieces = self.division(x)
        if pieces is not None:
            return Pieces(x, pieces.piece, pieces.size)
        return super().cells(x) if strips == 1 else Channels.of(x, strips)

    def observe(self, x: Tensor, moments: Moments | None, state: LayerState) -> LayerState:
        # how many positions there are decides about the cut
        return state.seeing(division=self.division(x)) if self.channels % self.groups else state

    def coefficients(self, moments: Moments | None, state: LayerState) -> MapResult:
        """Tables of the cells: channels, strips or pieces."""
        strips, pieces = state.observed.get("division", (1, None))
        statistics, update = self.group_statistics(moments, pieces, state)
        map = statistics.standardizing(self.eps)
        weight, bias = self.weight, self.bias
        if pieces is not None:
            map = map.each(lambda table: table[:, pieces.group])
            own = (None if t is None else t[pieces.channel] for t in (weight, bias))
            return MapResult(map.then(*own), update)
        wide = max(self.channels // self.groups, 1)
        map = map.each(lambda table: table.repeat_interleave(wide, dim=1))
        own = (None if t is None else t.repeat_interleave(strips) for t in (weight, bias))
        return MapResult(map.then(*own), update)

    def group_statistics(
        self, moments: Moments | None, pieces: Cut | None, state: LayerState
    ) -> tuple[Moments, StateUpdate | None]:
        """Mean and variance of each group, tables (1, G) or (N, G); running ones in eval mode."""
        if moments is None or not self.uses_batch(state):
            return self.running(state), None
        wide = max(self.channels // self.groups, 1)
        if pieces is None:
            if self.single(Moments(moments.mean, moments.var, moments.count * wide), state):
                return self.running(state), None
            pooled = self.pooled(moments, state, wide)
        else:
            smallest = int(pieces.piece.numel()) // self.groups
            if self.single(Moments(moments.mean, moments.var, smallest), state):
                return self.running(state), None
            pooled = self.pooled_pieces(moments, pieces, state)
        used = self.or_running(pooled, state)
        return self.each_sample(used, moments), self.tracked(pooled, state)

    def pooled_pieces(self, moments: Moments, pieces: Cut, state: LayerState) -> Moments:
        rows = moments.pooled(samples=self.virtual_batch)
        pooled = rows.pooled_by(pieces.group, self.groups)
        return pooled if self.virtual_batch is not None else self.shared(pooled, state)

    def fusion(self, x: Tensor, state: LayerState) -> Fusion | None:
        if self.channels % self.groups:
            return None
        if not self.pools_all(x):
            return running_map(self, self.groups, self.weight, self.bias)
        memory = self.memory(x.numel() // self.groups, state)
        return Pool("batch", self.eps, self.groups, self.weight, self.bias, memory)

    def sample_statistics(self, moments: Moments, x: Tensor) -> Moments:
        """Groups of channels from the table; strips and pieces of channels from x."""
        wide, uneven = divmod(self.channels, self.groups)
        if not uneven:
            return moments.pooled(channels=wide)
        _, pieces = self.division(x)
        x = dense(x.detach().to(moments.mean.dtype))
        layout = self.cells(x)
        cells = Moments(*plain.moments(x, layout), layout.count)
        if pieces is None:
            return cells
        pooled = cells.pooled_by(pieces.group, self.groups)
        assert isinstance(pooled.count, Tensor)
        return Moments(pooled.mean, pooled.var, pooled.count[:1])  # the same for every image

    @classmethod
    def options_from(cls, bn: TrainedBN, asked: dict[str, Any]) -> dict[str, Any]:
        return {**super().options_from(bn, asked), "groups": bn.channels}

    @classmethod
    def missing_choice(cls, asked: Mapping[str, Any]) -> str:
        if "groups" in asked:
            return ""
        return (
            "Without groups= there is a group for each channel, which is batch norm. Try "
            "groups=, or recipes.bgn(model, batch_size=), which has the paper's rule."
        )

    def channel_statistics(self) -> tuple[Tensor, Tensor] | None:
        kept = super().channel_statistics()
        if kept is None or self.groups == self.channels:
            return kept
        mean, var = kept
        if self.channels % self.groups == 0:
            wide = self.channels // self.groups
            return mean.repeat_interleave(wide), var.repeat_interleave(wide)
        if self.groups % self.channels:
            return None
        strips = mean.reshape(self.channels, -1)
        within = var.reshape(self.channels, -1).mean(1)
        return strips.mean(1), within + strips.var(1, correction=0)

    def as_batch_norm(self, like: Tensor | None = None) -> TrainedBN:
        bn = super().as_batch_norm(like)
        if self.running_mean is None or self.channels % self.groups == 0:
            return bn
        if bn.tracked:
            return bn.losing("statistics by position")
        return bn.losing("statistics of uneven groups")

    def varies(self) -> str:
        if self.channels % self.groups and not self.uses_moments():
            return "its groups cut channels, so the map depends on the position"
        return super().varies()

    def not_in_onnx(self, any_size: bool) -> str:
        if any_size and self.channels % self.groups:
            return "its groups cut channels, differently for each image size: try any_size=False"
        return super().not_in_onnx(any_size)

    def statistics_from(self, bn: TrainedBN) -> tuple[Tensor, Tensor]:
        channels = Moments(bn.mean[None], bn.var[None], 1)
        if self.channels % self.groups == 0:
            pooled = channels.pooled(channels=self.channels // self.groups)
            return pooled.mean[0], pooled.var[0]
        # many positions, so that groups weigh the channels they cut in the right proportion
        pieces = cut(self.channels, self.groups, self.groups, bn.mean.device)
        spread = Moments(bn.mean[pieces.channel][None], bn.var[pieces.channel][None], pieces.size)
        pooled = spread.pooled_by(pieces.group, self.groups)
        return pooled.mean[0], pooled.var[0]

    # ---------------------------------------------------------------- for diagnosis

    def channel_groups(self, moments: Moments) -> tuple[Moments, int] | Refusal:
        if self.channels % self.groups:
            return CUT
        return OWN_STATISTICS if self.groups == self.channels else (moments, self.groups)

    def divided_by(self, moments: Moments) -> Tensor | Refusal:
        return CUT if self.channels % self.groups else grouped(moments, self.groups).var[0]

    def standardizing(self, table: Moments, *, batch: bool) -> Coefficients | Refusal:
        if self.channels % self.groups:
            return CUT
        wide = self.channels // self.groups
        own = batch or self.running_mean is None
        statistics = table.pooled(samples=None, channels=wide) if own else self.running()
        return statistics.standardizing(self.eps).each(lambda t: t.repeat_interleave(wide, 1))
