"""Count, mean and sum of squared deviations: statistics that merge without error."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from normkit.core.moments import Moments
from normkit.core.precision import widest
from normkit.errors import OptionError


@dataclass(frozen=True, eq=False)
class Tally:
    """How many values, their mean, and Σ (x − mean)², per channel, in the widest number type.

    Two tallies of different data merge to the tally of all of it, whatever their sizes: what one
    pass over everything would have given. Variances never arise as E[x²] − E[x]², which cancels.
    """

    count: Tensor  # (K,)
    mean: Tensor  # (K,)
    m2: Tensor  # (K,)

    @classmethod
    def of(cls, table: Moments) -> Tally:
        """Of all rows of a table (N, K), each weighted by how many values stand behind it."""
        wide = widest(table.mean.device)
        mean, var = table.mean.to(wide), table.var.to(wide)
        weight = weights(table)
        if len(weight) == 1:
            return cls(weight[0], mean[0], weight[0] * var[0])
        count = weight.sum(0)
        center = (weight * mean).sum(0) / count
        return cls(count, center, (weight * (var + (mean - center).square())).sum(0))

    @classmethod
    def from_variance(cls, count: Tensor | float, mean: Tensor, var: Tensor) -> Tally:
        """As if ``count`` values with this mean and biased variance had been seen."""
        wide = widest(mean.device)
        mean, var = mean.to(wide), var.to(wide)
        number = torch.as_tensor(count, dtype=wide, device=mean.device)
        number = number.expand_as(mean)
        return cls(number, mean, number * var)

    @property
    def var(self) -> Tensor:
        """The biased variance: that of the population the values are."""
        return self.m2 / self.count

    def unbiased(self, correction: int = 1) -> Tensor:
        """Divided by count − correction, as torch.nn stores it."""
        return self.m2 / (self.count - correction)

    def merged(self, other: Tally) -> Tally:
        """The tally of both sets of values."""
        if self.mean.shape != other.mean.shape:
            raise OptionError(
                f"Statistics of {self.mean.numel()} and of {other.mean.numel()} entries cannot be "
                "merged: they are of different layers."
            )
        count = self.count + other.count
        share = torch.where(count > 0, other.count / count.clamp(min=1e-300), 0)
        step = other.mean - self.mean
        return Tally(
            count,
            self.mean + share * step,
            self.m2 + other.m2 + self.count * share * step.square(),
        )

    def table(self) -> Moments:
        """The same as a table (1, K) of moments."""
        return Moments(self.mean[None], self.var[None], self.count[None])

    def to(self, device: torch.device | str) -> Tally:
        return Tally(self.count.to(device), self.mean.to(device), self.m2.to(device))

    def is_finite(self) -> bool:
        return bool(torch.isfinite(self.mean).all() and torch.isfinite(self.m2).all())


def weights(table: Moments) -> Tensor:
    """The counts of a table's entries, as a table (N, K)."""
    device = table.mean.device
    count = torch.as_tensor(table.count, device=device).to(widest(device))
    return count.expand_as(table.mean)


class Pooling:
    """The statistics of all batches so far, as moments; those of a single one stay as they came."""

    def __init__(self) -> None:
        self._first: Moments | None = None
        self._tally: Tally | None = None  # from the second on

    def add(self, batch: Moments) -> None:
        """Take in the statistics of a batch, tables (1, K), weighted by how many values it had."""
        if self._first is None:
            self._first = batch
            return
        before = self._tally or Tally.of(self._first)
        self._tally = before.merged(Tally.of(batch))

    @property
    def total(self) -> Moments | None:
        """Tables (1, K); None if there was no batch."""
        return self._first if self._tally is None else self._tally.table()
