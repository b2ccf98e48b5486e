"""What calibration, diagnosis and fits ask of a norm, with answers that hold for most.

A layer overrides its own; norms of other libraries have an adapter in inspection.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from normkit.core.moments import Coefficients, Moments


class Refusal(str):
    """Why something cannot be measured at a norm, in place of the value: "it has no gate"."""


OWN_STATISTICS = Refusal("every channel has statistics of its own")
MIXTURE = Refusal("it mixes statistics of several kinds")


class Measured:
    """The questions. ``table`` are moments (N, C) of an input, ``moments`` (1, C) of all of it."""

    eps: float
    weight: Tensor | None
    bias: Tensor | None

    for_small_batches: ClassVar[bool] = False
    """Whether it is made for batches that are too small for statistics of a batch."""
    counts_what_it_blends: ClassVar[bool] = True
    """Whether each batch that it counts enters its running statistics."""
    is_fixed: ClassVar[bool] = False
    """Whether its statistics never change, in train mode either."""
    reads_each_sample: ClassVar[bool] = False
    """Whether means of each sample enter its map, beside the statistics."""

    plain_statistics: ClassVar[bool] = False
    """Whether running statistics are those of each channel of the input, as bn keeps them."""
    shares_batch: ClassVar[bool] = False
    """Whether samples of a training batch share statistics, with some options at least."""
    running_correction: int = 0
    """1 if the running variance is unbiased, as torch.nn stores it; 0 if it is biased."""

    # ---------------------------------------------------------------- before it is fitted

    def prepare_fit(self, x: Tensor, wanted: Tensor) -> tuple[str, ...]:
        """Set what is peculiar to the layer, before its output map is fitted: from tables (values,
        channels) of its inputs, and of the outputs that it is to come near to. Returns which
        tensors were set."""
        return ()

    # ---------------------------------------------------------------- the statistics it keeps

    def running_buffers(self) -> dict[str, Tensor]:
        """The buffers that hold running statistics, by name; none unless a layer says so."""
        return {}

    def of_domain(self, tables: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Of values for its buffers, such as those of a checkpoint, those that are in use now."""
        return dict(tables)

    def batch_counter(self) -> Tensor | None:
        """How many batches the running statistics are of; None if it does not count."""
        return None

    def sample_statistics(self, moments: Moments, x: Tensor) -> Moments:
        """What running statistics are averages of, tables (N, K): for each sample, from the
        moments (N, C) of its channels."""
        return moments

    def decode_statistics(self, buffers: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Mean and variance, from what the running buffers hold."""
        return buffers["running_mean"], buffers["running_var"]

    def encode_statistics(self, mean: Tensor, var: Tensor) -> dict[str, Tensor]:
        """What the running buffers hold for a mean and a variance."""
        return {"running_mean": mean, "running_var": var}

    # ---------------------------------------------------------------- statistics and channels

    def sample_groups(self) -> int | None:
        """Into how many groups of channels a sample falls, each normalized by its own statistics.

        None if it is normalized in another way.
        """
        return None

    def channel_groups(self, moments: Moments) -> tuple[Moments, int] | Refusal:
        """The moments of what is grouped, and into how many groups that share statistics."""
        groups = self.sample_groups()
        if groups is None or groups == moments.mean.shape[1]:
            return OWN_STATISTICS
        return moments, groups

    def divided_by(self, moments: Moments) -> Tensor | Refusal:
        """The variance (C,) by whose root each channel is divided."""
        groups = self.sample_groups()
        if groups is None:
            return Refusal("it divides a channel by no deviation, or by several")
        return grouped(moments, groups).var[0]

    def gamma(self) -> Tensor | Refusal | None:
        """The factor (C,) that x̂ is multiplied by; None for 1."""
        if self.weight is None or self.weight.dim() == 1:
            return self.weight
        return Refusal("its weight is not one factor for each channel")

    def group_size(self, shape: torch.Size) -> int | None:
        """How many values of a sample share statistics; None where samples share them."""
        groups = self.sample_groups()
        return None if groups is None else math.prod(shape[1:]) // groups

    # ---------------------------------------------------------------- what it computes

    def standardized(self, x: Tensor, table: Moments, *, batch: bool) -> Tensor | Refusal:
        """x̂ before the affine map: as in eval mode, or with the statistics of the batch."""
        found = self.standardizing(table, batch=batch)
        if isinstance(found, Refusal):
            return found
        return found.each(
            lambda t: t.detach().to(torch.float32).reshape(*t.shape, *(1,) * (x.dim() - 2))
        ).of(x.float())

    def standardizing(self, table: Moments, *, batch: bool) -> Coefficients | Refusal:
        """The map from x to x̂, tables (1, C) or (N, C)."""
        groups = self.sample_groups()
        if groups is None:
            return Refusal("it standardizes nothing before an affine map")
        return grouped(table, groups).standardizing(self.eps)

    def gates(self, table: Moments) -> Tensor | Refusal:
        """A factor between 0 and 1 for each sample and channel, learning nothing on the way."""
        return Refusal("it has no gate")

    def threshold(self) -> tuple[Tensor, Tensor] | Refusal:
        """Whether a score keeps it a fixed map at present, a boolean (1,), and that score."""
        return Refusal("it has no threshold")

    # ---------------------------------------------------------------- how it is trained

    def pools_samples(self) -> bool:
        """Whether samples share statistics in training."""
        return False

    def followed_rate(self) -> float | None:
        """The rate at which its estimates move; None if they do not follow the learning rate.

        NaN as long as it is not known.
        """
        return None

    def affine_at_start(self) -> bool:
        """Whether γ and β, if any, are what a new layer has: then it was never trained.

        γ is then the same in all channels, whatever it is: 1, 0 in the last norm of a residual
        block in some recipes, or what makes up for a gate in a layer that was converted.
        """
        scale, bias = self.weight, self.bias
        new = scale is None or scale.dim() != 1 or bool((scale == scale[:1]).all())
        return new and (bias is None or bool((bias == 0).all()))


def grouped(moments: Moments, groups: int) -> Moments:
    """The statistics of each group, for each of its channels: tables as wide as before."""
    wide = moments.mean.shape[1] // groups
    pooled = moments.pooled(channels=wide)
    mean, var = (t.repeat_interleave(wide, 1) for t in (pooled.mean, pooled.var))
    return Moments(mean, var, pooled.count)
