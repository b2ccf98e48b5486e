"""Moments of tensors, how they pool, and how an affine map changes them.

This file is the one home of pooling: whoever needs statistics over samples, channel groups,
strips or runs of samples starts from a table of moments and pools it here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from normkit.core.precision import statistics_dtype


class Coefficients(NamedTuple):
    """The map y = scale · (x − center) + shift, as tables that broadcast to (N, K).

    None stands for a table of zeros. A center near the values keeps differences small: where a mean
    is far from zero, shift − scale · center would cancel with scale · x and lose digits.
    """

    scale: Tensor
    shift: Tensor | None = None
    center: Tensor | None = None

    def then(
        self, scale: Tensor | None, shift: Tensor | None = None, center: Tensor | None = None
    ) -> Coefficients:
        """The map followed by another one. Normalizers are closed under composition."""
        a, b, own = self
        if center is not None:
            b = -center if b is None else b - center
        if scale is not None:
            scale = scale.to(a.dtype)  # once: two parts of a narrow parameter's gradient may cancel
            a = a * scale
            if b is not None:
                b = b * scale if shift is None else torch.addcmul(shift, b, scale)
                return Coefficients(a, b, own)
        if shift is not None:
            b = shift if b is None else b + shift
        return Coefficients(a, b, own)

    def after_adding(self, table: Tensor | None) -> Coefficients:
        """The map, preceded by the addition of a table."""
        if table is None:
            return self
        center = -table if self.center is None else self.center - table
        return Coefficients(self.scale, self.shift, center)

    def of(self, table: Tensor) -> Tensor:
        """The map applied to a table, such as the means."""
        apart = table if self.center is None else table - self.center
        if self.shift is None:
            return self.scale * apart
        return torch.addcmul(self.shift, self.scale, apart)

    def each(self, function: Callable[[Tensor], Tensor]) -> Coefficients:
        """The map with a function applied to its tables, such as one that repeats entries."""
        return Coefficients(*(None if t is None else function(t) for t in self))  # type: ignore[arg-type]

    def flat(self) -> tuple[Tensor, Tensor]:
        """Scale and shift of the same map without a center: y = scale · x + shift."""
        return self.scale, self.of(torch.zeros_like(self.scale))


@dataclass(frozen=True)
class Moments:
    """Mean and biased variance of the cells of a tensor: tables (N, K), one entry a cell.

    K is the number of channels, or of strips or pieces of channels. ``count`` is how many values
    stand behind an entry: a number, or a tensor that broadcasts to the tables.
    """

    mean: Tensor  # (N, K)
    var: Tensor  # (N, K)
    count: int | Tensor

    def after(self, map: Coefficients) -> Moments:
        """The moments of the tensor once ``map`` has been applied to it."""
        return Moments(map.of(self.mean), map.scale.square() * self.var, self.count)

    def pooled(self, *, samples: int | None = 1, channels: int | None = 1) -> Moments:
        """Pool runs of ``samples`` and runs of ``channels``; None means all of them.

        Gives tables (R, G). The last run of samples may be shorter; channels must divide.
        Variances are merged about the pooled mean, never as E[x²] − E[x]², which cancels.
        """
        n, k = self.mean.shape
        if n == 0:
            return self._of_nothing(samples, channels or k)
        samples = n if samples is None else min(samples, n)
        channels = k if channels is None else channels
        if samples == 1 and channels == 1:
            return self
        whole = n - n % samples
        if whole < n:
            head, tail = (
                self.rows(part).pooled(samples=samples, channels=channels)
                for part in (slice(0, whole), slice(whole, n))
            )
            count = torch.cat([_column(head), _column(tail)])
            return Moments(
                torch.cat([head.mean, tail.mean]), torch.cat([head.var, tail.var]), count
            )
        blocks = (n // samples, samples, k // channels, channels)
        mean, var = self.mean.reshape(blocks), self.var.reshape(blocks)
        if isinstance(self.count, Tensor) and self.count.dim() == 2:
            return self._weighted(self.count, mean, var)
        near = mean[:, :1, :, :1].detach()  # sums of differences round less than those of means
        apart = mean - near
        middle = apart.mean((1, 3), keepdim=True)
        apart = apart - middle
        spread = torch.addcmul(var, apart, apart).mean((1, 3))
        return Moments((near + middle).flatten(1), spread, self.count * samples * channels)

    def _of_nothing(self, samples: int | None, channels: int) -> Moments:
        """No run of samples, or one without values: a count of 0, and a way for gradients."""
        shape = (0 if samples else 1, -1, channels)
        mean, var = (
            (t if samples else t.sum(0, keepdim=True)).unflatten(1, shape[1:]).sum(2)
            for t in (self.mean, self.var)
        )
        return Moments(mean, var, mean.new_zeros(shape[0], 1))

    def rows(self, part: slice | Tensor) -> Moments:
        """Those of some samples."""
        count = self.count
        if isinstance(count, Tensor) and count.dim() == 2 and count.shape[0] > 1:
            count = count[part]
        return Moments(self.mean[part], self.var[part], count)

    def _weighted(self, count: Tensor, mean: Tensor, var: Tensor) -> Moments:
        """Pool blocks (R, samples, G, channels) whose entries have counts of their own, (N, 1) or
        (N, K): an entry of none has no weight, and nothing but such entries gives 0."""
        runs, samples, groups, channels = mean.shape
        same = count.shape[1] == 1  # in all channels
        count = count.expand(runs * samples, -1)
        columns = (1, 1) if same else (groups, channels)
        weight = count.reshape(runs, samples, *columns)
        total = weight.sum((1, 3)) * (channels if same else 1)  # (R, 1) or (R, G)
        share = weight.to(mean.dtype) / total.clamp(min=1)[:, None, :, None]
        near = (share * mean).sum((1, 3), keepdim=True).detach()
        apart = mean - near
        middle = (share * apart).sum((1, 3), keepdim=True)
        apart = apart - middle
        spread = (share * torch.addcmul(var, apart, apart)).sum((1, 3))
        return Moments((near + middle).flatten(1), spread, total)

    def pooled_by(self, group: Tensor, groups: int) -> Moments:
        """Pool the cells k of equal ``group[k]``, row by row: tables (N, groups).

        For cells of unequal size, so every entry is weighted by its count.
        """

        def total(table: Tensor) -> Tensor:
            return table.new_zeros(table.shape[0], groups).index_add(1, group, table)

        weight = torch.as_tensor(self.count, device=self.mean.device).to(self.mean.dtype)
        weight = weight.expand_as(self.mean)
        count = total(weight)
        some = count.clamp(min=1)  # of no samples there is nothing to divide
        near = (total(weight * self.mean) / some).detach()
        mean = near + total(weight * (self.mean - near[:, group])) / some
        inside = self.var + (self.mean - mean[:, group]).square()
        return Moments(mean, total(weight * inside) / some, count)

    def standardizing(self, eps: float) -> Coefficients:
        """The map that brings these moments to mean 0 and variance var / (var + eps)."""
        return Coefficients(torch.rsqrt(self.var + eps), None, self.mean)

    def unbiased(self, correction: int = 1) -> Tensor:
        """The variance divided by count − correction instead of count."""
        if not correction:
            return self.var
        rest = self.count - correction
        if isinstance(rest, Tensor):
            rest = rest.clamp(min=1)  # of one value it is 0
        return self.var * self.count / rest

    def filled_rows(self) -> int | Tensor:
        """How many samples have any value at all: without a mask all."""
        count = self.count
        if isinstance(count, Tensor) and count.dim() == 2:
            return (count > 0).any(1).sum()
        return self.mean.shape[0]

    def enough(self, least: int = 2) -> Tensor | None:
        """Whether so many values stand behind every column, a boolean on the device; None where
        that is known without looking."""
        if not isinstance(self.count, Tensor) or self.count.dim() < 2:
            return None
        return (self.count.sum(0) >= least).all()


def standardization_error(used: Moments, true: Moments, eps: float) -> Tensor:
    """Per cell: mean square of what wrong statistics add to the standardized output.

    E[(x̂ − x̃)²] of x with the ``true`` moments, x̂ standardized by those ``used`` and x̃ by the true
    ones. It has no unit: 1 means that the error is as large as the signal.
    """
    scale, true_scale = (used.var + eps).rsqrt(), (true.var + eps).rsqrt()
    wrong_scale = true.var * (scale - true_scale).square()
    return wrong_scale + ((true.mean - used.mean) * scale).square()


def per_channel(weight: Tensor | None, bias: Tensor | None, x: Tensor) -> Coefficients:
    """The map of a weight, a bias or both, for all samples; as wide as statistics of x would be."""
    some = bias if weight is None else weight
    assert some is not None
    weight = torch.ones_like(some) if weight is None else weight
    bias = torch.zeros_like(some) if bias is None else bias
    dtype = statistics_dtype(torch.promote_types(some.dtype, x.dtype))
    return Coefficients(weight[None].to(dtype), bias[None].to(dtype))


def _column(moments: Moments) -> Tensor:
    """The counts as a column (R, 1), or a table (R, K), so that unequal runs can be joined."""
    count = torch.as_tensor(moments.count, device=moments.mean.device)
    return count.expand(moments.mean.shape[0], count.shape[-1] if count.dim() else 1)


def spread(table: Tensor, *, samples: int, runs_of: int = 1, groups_of: int = 1) -> Tensor:
    """The inverse of pooling for a table (R, G): each entry repeated to the cells it came from.

    A table of one run stays one row: it broadcasts.
    """
    if groups_of > 1:
        table = table.repeat_interleave(groups_of, dim=1)
    if table.shape[0] > 1 and runs_of > 1:
        table = table.repeat_interleave(runs_of, dim=0)[:samples]
    return table
