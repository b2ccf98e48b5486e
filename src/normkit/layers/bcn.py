"""bcn: batch-channel normalization, for large and for micro batches."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from normkit.core.card import Card
from normkit.core.fusion import Channel, Fusion
from normkit.core.groups import GroupPolicy, resolve_groups
from normkit.core.messages import title
from normkit.core.moments import Coefficients, Moments
from normkit.core.running import all_finite, is_recomputation
from normkit.core.trained import SCALES, ParameterRole, TrainedBN
from normkit.errors import OptionError
from normkit.layers.batch import BatchNormalizer
from normkit.layers.gn import group_standardizing
from normkit.layers.measured import OWN_STATISTICS, Refusal

NOT_MICRO = {
    "momentum",
    "virtual_batch",
    "running_var_correction",
    "on_single",
    "track_running_stats",
}


class BCN(BatchNormalizer):
    """Batch-channel normalization: a batch norm, then a group norm of its output.

    Formula:
        z = weight · (x − mean) / √(var + eps) + bias
        y = group_weight · (z − mean_g) / √(var_g + eps) + group_bias
        micro: mean ← mean + rate · (batch mean − mean)
               var ← var + rate · (mean of (x − old mean)² − var), then z as above

    Statistics: mean and var per channel as bn; mean_g and var_g per sample and group of z, in
    both modes. With ``micro=True`` mean and var are running estimates, updated before use and
    constants for the gradient, so one image a batch is enough; eval mode only stops the updates.

    Shapes: (N, C, *spatial) to the same; group_weight and group_bias are (groups,).

    Use when: together with weight standardization; micro=True for one or two images a worker.
    Avoid when: group_weight is expected per channel, as gn has it: affine_per="channel".

    Paper: Qiao et al. 2019 (ws-bcn), section 5 and algorithm 1. The rate follows the learning
    rate: ``normkit.follow_learning_rate(model, optimizer)`` does that in one line;
    ``update_rate`` fixes it. The released class never sets it, so its estimates never move.
    ``update_every="step"`` collects micro-batches and updates once an optimizer step, where
    the paper is silent. eps is the code's; algorithm 1 has none.

    from_batch_norm carries the batch part exactly; the group norm after it starts neutral but
    changes the function.

    >>> import torch, normkit as nk
    >>> layer = nk.BCN(8, groups=2, micro=True, update_rate=0.1)
    >>> layer(torch.randn(1, 8, 5, 5)).shape
    torch.Size([1, 8, 5, 5])
    """

    card = Card(
        name="bcn",
        title="Batch-Channel Normalization",
        paper="Qiao et al. 2019 (ws-bcn)",
        pools_samples=True,
    )
    beyond_batch_norm = ("group norm after it",)
    rate: Tensor
    pending_mean: Tensor
    pending_square: Tensor
    pending_count: Tensor
    group_weight: Tensor | None
    group_bias: Tensor | None

    def __init__(
        self,
        channels: int,
        *,
        groups: int | None = None,
        group_policy: GroupPolicy = "error",
        micro: bool = False,
        affine_per: str = "group",
        update_rate: float | None = None,
        update_every: str = "forward",
        **options: Any,
    ) -> None:
        super().__init__(channels, **options)
        self.group_policy, self.micro, self.update_rate = group_policy, micro, update_rate
        self.groups = resolve_groups(channels, groups, group_policy, owner="BCN")
        self.affine_per = self._choice("affine_per", affine_per, ("group", "channel"))
        self.update_every = self._choice("update_every", update_every, ("forward", "step"))
        if not micro and (update_rate is not None or update_every != "forward"):
            raise OptionError("BCN expects update_rate and update_every with micro=True only.")
        if micro and options.keys() & NOT_MICRO:
            raise OptionError(
                "BCN(micro=True) is made of running estimates that move at update_rate: it has no "
                f"{', '.join(sorted(options.keys() & NOT_MICRO))}."
            )
        size = self.groups if affine_per == "group" else channels
        self.register_parameter("group_weight", self._new(1.0, size) if self.affine else None)
        self.register_parameter("group_bias", self._new(0.0, size) if self.affine else None)
        if micro:
            self.register_buffer("rate", self._statistic(math.nan, 1))
            for name, size in (("mean", channels), ("square", channels), ("count", 1)):
                self.register_buffer(
                    f"pending_{name}", self._statistic(0.0, size), persistent=False
                )
            self._rate_known = update_rate is not None
            if update_rate is not None:
                self.set_update_rate(update_rate)

    @property
    def running_correction(self) -> int:  # type: ignore[override]
        return 0 if self.micro else super().running_correction

    def uses_moments(self) -> bool:
        return True  # the group norm has no other statistics

    def coefficients(self, moments: Moments | None) -> Coefficients:
        assert moments is not None
        found = self.estimates(moments) if self.micro else self.statistics(moments)
        first = found.standardizing(self.eps).then(self.weight, self.bias)
        second = group_standardizing(moments.after(first), self.groups, self.eps)
        wide = self.channels // self.groups if self.affine_per == "group" else 1
        if self.group_weight is not None and self.group_bias is not None:
            weight, bias = (t.repeat_interleave(wide) for t in (self.group_weight, self.group_bias))
            second = second.then(weight, bias)
        return first.then(*second)

    def fusion(self, x: Tensor) -> Fusion | None:
        own = self.weight, self.bias, self.group_weight, self.group_bias
        memory = self.memory(x.numel() // self.channels)
        if not self.micro and self.uses_batch():
            return Channel(self.eps, self.groups, *own, None, memory) if self.pools_all(x) else None
        if self.micro and self.training:
            if self.update_every == "step" or not self._rate_known:
                return None
            if memory is not None:
                memory = memory._replace(correction=1.0)
                return Channel(self.eps, self.groups, *own, None, memory, self.rate)
        assert self.running_mean is not None and self.running_var is not None
        return Channel(self.eps, self.groups, *own, (self.running_mean, self.running_var))

    # ---------------------------------------------------------------- micro batches

    def after_fusion(self, fusion: Fusion, tables: Tensor, begin: int, x: Tensor) -> None:
        if fusion.memory is not None or not self.micro:  # otherwise it was computed again
            super().after_fusion(fusion, tables, begin, x)

    @property
    def needs_update_rate(self) -> bool:
        return self.micro and self.update_rate is None

    def set_worker_batch(self, samples: int) -> None:
        if not self.micro:  # workers share the running estimates
            super().set_worker_batch(samples)

    @torch.no_grad()
    def scale_by(self, scale: Tensor) -> None:
        if self.group_weight is not None and not scale.any():
            self.group_weight.zero_()  # a zero before the group norm would be divided by eps
        else:
            super().scale_by(scale)

    def set_update_rate(self, rate: float) -> None:
        """The weight of the new batch in the estimates; clipped to 0 … 1."""
        if not self.micro:
            raise OptionError("BCN has an update rate with micro=True only.")
        if not math.isfinite(rate):
            raise OptionError(f"BCN expects a finite update rate, got {rate!r}.")
        self.rate.fill_(min(max(float(rate), 0.0), 1.0))
        self._rate_known = True

    def blend_weight(self) -> float | Tensor:
        return self.rate if self.micro else super().blend_weight()

    def estimates(self, moments: Moments) -> Moments:
        """The running estimates, after this batch has entered them; no gradient."""
        if self.training:
            if not self._rate_known:
                raise OptionError(
                    f"{title(self)} has no update rate yet. Try "
                    "normkit.follow_learning_rate(model, optimizer), or update_rate=0.01."
                )
            with torch.no_grad():
                batch = moments.pooled(samples=None)
                self._update(batch.mean[0], batch.var[0])
        return self.running()

    def _update(self, mean: Tensor, var: Tensor) -> None:
        assert self.running_mean is not None
        square = var + (mean - self.running_mean).square()  # about the old mean
        if self.update_every == "forward":
            self.remember(running_mean=mean, running_var=square)
        elif not is_recomputation():
            good = all_finite((mean, square))
            self.nonfinite_batches += ~good
            for pending, value in (
                (self.pending_mean, mean),
                (self.pending_square, square),
                (self.pending_count, torch.ones_like(self.pending_count)),
            ):
                pending.add_(torch.where(good, value, 0))

    @torch.no_grad()
    def commit(self) -> None:
        """Let the batches collected since the last optimizer step enter the estimates."""
        if self.micro and self.update_every == "step":
            count = self.pending_count.clamp(min=1)
            keep = self.pending_count > 0
            assert self.running_mean is not None and self.running_var is not None
            self.remember(
                counted=keep,
                running_mean=torch.where(keep, self.pending_mean / count, self.running_mean),
                running_var=torch.where(keep, self.pending_square / count, self.running_var),
            )
            for pending in (self.pending_mean, self.pending_square, self.pending_count):
                pending.zero_()

    @classmethod
    def options_from(cls, bn: TrainedBN, asked: dict[str, Any]) -> dict[str, Any]:
        found = super().options_from(bn, asked)
        return {k: v for k, v in found.items() if not (asked.get("micro") and k in NOT_MICRO)}

    def parameter_role(self, name: str) -> ParameterRole:
        if name == "group_weight":  # the second scale
            return ParameterRole(SCALES)
        return super().parameter_role(name)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        if self.micro and not self._rate_known and self.rate.device.type != "meta":
            self._rate_known = bool(torch.isfinite(self.rate).all())

    # ---------------------------------------------------------------- for diagnosis

    def followed_rate(self) -> float | None:
        return float(self.rate) if self.micro else None

    def pools_samples(self) -> bool:
        return not self.micro

    def channel_groups(self, moments: Moments) -> tuple[Moments, int] | Refusal:
        if self.groups == self.channels:
            return OWN_STATISTICS
        first = self.running().standardizing(self.eps).then(self.weight, self.bias)
        return moments.after(first), self.groups  # of what its batch norm gives

    def divided_by(self, moments: Moments) -> Tensor | Refusal:
        return Refusal("it is two norms, which divide one after the other")

    def group_size(self, shape: torch.Size) -> int:
        return math.prod(shape[1:]) // self.groups
