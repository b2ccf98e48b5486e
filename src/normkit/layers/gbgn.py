"""gbgn: general batch group normalization, groups of samples and of channels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from normkit.core.card import Card
from normkit.core.groups import GroupPolicy, resolve_groups
from normkit.core.moments import Coefficients, Moments, spread
from normkit.core.statistics import LayerState, MapResult, StateUpdate
from normkit.errors import OptionError
from normkit.layers.batch import BatchNormalizer
from normkit.layers.measured import OWN_STATISTICS, Refusal, grouped


class GBGN(BatchNormalizer):
    """General batch group normalization: between gn (one sample a group) and bn.

    Formula:
        y = weight · (x − mean) / √(var + eps) + bias

    Statistics: one mean and variance per run of ``examples_per_group`` consecutive samples and
    group of C / groups consecutive channels; the last run may be shorter. Running mean and
    running second moment per channel, over the whole batch, are averaged within each group in
    eval mode, and the variance is their difference: larger than an average of variances, since
    it contains how the means moved. ``eval_weight`` blends in the moments of the test sample.

    Shapes: (N, C, *spatial) to the same.

    Use when: medium batches; the baseline of bgn, which it beat by 5 to 7 points with two images a
    worker. Warm the learning rate up: an epoch of it was worth 7 to 9 points in a ResNet-20
    (docs/evidence.md, m).
    Avoid when: groups of one sample and one channel on small maps.

    Paper: Summers & Dinneen 2020. The "batch groups = batch size" of the bgn paper means the
    whole batch in one group, the default here: one example a group would be gn, and its printed
    result equals bgn with 32 groups. Their decay 0.99 is our momentum 0.01. Their decay of
    weight towards 1 is a matter of the optimizer and not part of the layer.

    from_batch_norm carries weight, bias and both moments; exact where groups = C.

    >>> import torch, normkit as nk
    >>> x = torch.randn(4, 8, 5, 5)
    >>> layer = nk.GBGN(8, groups=2, examples_per_group=1)
    >>> torch.allclose(layer(x), nk.GN(8, groups=2)(x), atol=1e-5)
    True
    """

    card = Card(
        name="gbgn",
        title="General Batch Group Normalization",
        paper="Summers & Dinneen 2020",
        pools_samples=True,
    )
    withheld = frozenset({"running_var_correction", "on_single"})
    second_buffer = "running_second_moment"
    running_correction = 0
    running_second_moment: Tensor | None

    def __init__(
        self,
        channels: int,
        *,
        groups: int | None = None,
        group_policy: GroupPolicy = "error",
        examples_per_group: int | str = "batch",
        eval_weight: float = 0.0,
        momentum: float | None = 0.01,
        **options: Any,
    ) -> None:
        super().__init__(channels, momentum=momentum, **options)
        self.group_policy = group_policy
        self.groups = resolve_groups(channels, groups, group_policy, owner="GBGN")
        if examples_per_group != "batch":
            self._positive("examples_per_group", examples_per_group)
        if not 0 <= eval_weight <= 1:
            raise OptionError(f"GBGN expects eval_weight between 0 and 1, got {eval_weight!r}.")
        self.examples_per_group = examples_per_group
        self.eval_weight = eval_weight

    def uses_moments(self) -> bool:
        return self.uses_batch() or self.eval_weight > 0

    def coefficients(self, moments: Moments | None, state: LayerState) -> MapResult:
        standardized, update = self.standardized_by(moments, state)
        return MapResult(standardized.then(self.weight, self.bias), update)

    def standardized_by(
        self, moments: Moments | None, state: LayerState
    ) -> tuple[Coefficients, StateUpdate | None]:
        """The map to x̂, and new statistics."""
        wide, update = self.channels // self.groups, None
        if not self.uses_batch(state):
            pooled = self.population(moments, state)
            rows, run = pooled.mean.shape[0], 1
        else:
            assert moments is not None
            rows = moments.mean.shape[0]
            wanted = (self.examples_per_group, self.virtual_batch)
            run = min([rows, *(limit for limit in wanted if isinstance(limit, int))])
            whole = self.shared(moments.pooled(samples=None), state)
            update = self.tracked(whole, state)
            if self.examples_per_group == "batch" and self.virtual_batch is None:
                pooled = whole.pooled(channels=wide)
            else:  # runs stay within a process
                pooled = moments.pooled(samples=run, channels=wide)
        map = pooled.standardizing(self.eps)
        return map.each(
            lambda table: spread(table, samples=rows, runs_of=run, groups_of=wide)
        ), update

    @torch.no_grad()
    def tracked(self, pooled: Moments, state: LayerState) -> StateUpdate | None:
        if not self.tracks(state):
            return None
        mean, var = pooled.mean[0], pooled.var[0]
        second = var + mean.square()
        some = pooled.enough(1)
        return self.blended(state, counted=some, running_mean=mean, running_second_moment=second)

    def population(self, moments: Moments | None, state: LayerState) -> Moments:
        """The statistics of eval mode, tables (1, G), or (N, G) with the sample's own share."""
        grouped = (1, self.groups, -1)
        first = state["running_mean"].reshape(grouped).mean(2)
        second = state["running_second_moment"].reshape(grouped).mean(2)
        if moments is not None:
            own = moments.pooled(channels=self.channels // self.groups)
            share = self.eval_weight  # not by lerp, which takes no input of another type
            first = (1 - share) * first + share * own.mean
            second = (1 - share) * second + share * (own.var + own.mean.square())
        return Moments(first, torch.clamp(second - first.square(), min=0), 1)

    def decode_statistics(self, buffers: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        mean, second = buffers["running_mean"], buffers["running_second_moment"]
        return mean, second - mean.square()

    def encode_statistics(self, mean: Tensor, var: Tensor) -> dict[str, Tensor]:
        return {"running_mean": mean, "running_second_moment": var + mean.square()}

    def channel_statistics(self) -> tuple[Tensor, Tensor] | None:
        if self.running_mean is None:
            return None
        wide, groups = self.channels // self.groups, self.population(None, self.state())
        return groups.mean[0].repeat_interleave(wide), groups.var[0].repeat_interleave(wide)

    # ---------------------------------------------------------------- for diagnosis

    def channel_groups(self, moments: Moments) -> tuple[Moments, int] | Refusal:
        return OWN_STATISTICS if self.groups == self.channels else (moments, self.groups)

    def divided_by(self, moments: Moments) -> Tensor | Refusal:
        return grouped(moments, self.groups).var[0]

    def standardizing(self, table: Moments, *, batch: bool) -> Coefficients | Refusal:
        given = table if self.uses_moments() or batch else None
        return self.standardized_by(given, self.state_for(batch))[0]
