"""What a norm keeps: how its running statistics come from its input, and into its buffers.

What is peculiar to a layer of normkit the layer says itself, in ``running_buffers``,
``running_correction``, ``sample_statistics``, ``decode_statistics`` and ``encode_statistics`` (see
layers/measured.py). ``ForeignNorm`` says it for norms of torch.nn, timm and others (foreign.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from normkit.core.layout import Channels, dense
from normkit.core.masks import MaskedCells, blank
from normkit.core.moments import Moments
from normkit.core.precision import widest
from normkit.engine import plain
from normkit.errors import OptionError, ShapeError
from normkit.inspection.foreign import answering_for
from normkit.inspection.kinds import STORED_AS_TORCH, kind_of
from normkit.layers.base import Normalizer
from normkit.layers.masking import valid_positions

AT_ONCE = 1 << 22  # values in float64 at a time: 32 MB, whatever the size of the activations


@dataclass(frozen=True, eq=False)
class MergedMoments:
    """How many values, their mean, and Σ (x − mean)², per channel, in the widest number type.

    Those of different data merge to those of all of it, whatever their sizes: what one pass over
    everything would have given. Variances never arise as E[x²] − E[x]², which cancels.
    """

    count: Tensor  # (K,)
    mean: Tensor  # (K,)
    m2: Tensor  # (K,)

    @classmethod
    def of(cls, table: Moments) -> MergedMoments:
        """Of all rows of a table (N, K), each weighted by how many values stand behind it."""
        wide = widest(table.mean.device)
        mean, var = table.mean.to(wide), table.var.to(wide)
        weight = weights_of_rows(table)
        if len(weight) == 1:
            return cls(weight[0], mean[0], weight[0] * var[0])
        count = weight.sum(0)
        center = (weight * mean).sum(0) / count.clamp(min=1)  # a mask may leave nothing
        return cls(count, center, (weight * (var + (mean - center).square())).sum(0))

    @classmethod
    def from_variance(cls, count: Tensor | float, mean: Tensor, var: Tensor) -> MergedMoments:
        """As if ``count`` values with this mean and biased variance had been seen."""
        wide = widest(mean.device)
        mean, var = mean.to(wide), var.to(wide)
        number = torch.as_tensor(count, dtype=wide, device=mean.device).expand_as(mean)
        return cls(number, mean, number * var)

    @property
    def var(self) -> Tensor:
        """The biased variance: that of the population the values are."""
        return self.m2 / self.count

    def unbiased(self, correction: int = 1) -> Tensor:
        """Divided by count − correction, as torch.nn stores it."""
        return self.m2 / (self.count - correction)

    def merged(self, other: MergedMoments) -> MergedMoments:
        """Of both sets of values."""
        if self.mean.shape != other.mean.shape:
            raise OptionError(
                f"Statistics of {self.mean.numel()} and of {other.mean.numel()} entries cannot be "
                "merged: they are of different layers."
            )
        count = self.count + other.count
        share = torch.where(count > 0, other.count / count.clamp(min=1e-300), 0)
        step = other.mean - self.mean
        m2 = self.m2 + other.m2 + self.count * share * step.square()
        return MergedMoments(count, self.mean + share * step, m2)

    def table(self) -> Moments:
        """The same as a table (1, K) of moments."""
        return Moments(self.mean[None], self.var[None], self.count[None])

    def to(self, device: torch.device | str) -> MergedMoments:
        return MergedMoments(self.count.to(device), self.mean.to(device), self.m2.to(device))

    def is_finite(self) -> bool:
        return bool(torch.isfinite(self.mean).all() and torch.isfinite(self.m2).all())


class MomentsAccumulator:
    """The statistics of all batches so far, as moments; those of a single one stay as they came."""

    def __init__(self) -> None:
        self._first: Moments | None = None
        self._merged: MergedMoments | None = None  # from the second on

    def add(self, batch: Moments) -> None:
        """Take in the statistics of a batch, tables (1, K), weighted by how many values it had."""
        if self._first is None:
            self._first = batch
            return
        before = self._merged or MergedMoments.of(self._first)
        self._merged = before.merged(MergedMoments.of(batch))

    @property
    def total(self) -> Moments | None:
        """Tables (1, K); None if there was no batch."""
        return self._first if self._merged is None else self._merged.table()


def weights_of_rows(table: Moments) -> Tensor:
    """The counts of a table's entries, as a table (N, K)."""
    device = table.mean.device
    count = torch.as_tensor(table.count, device=device).to(widest(device))
    return count.expand_as(table.mean)


class NormStatistics:
    """The running statistics of one norm: from its input, from and into its buffers."""

    def __init__(self, path: str, norm: nn.Module, kind: str) -> None:
        self.path, self.norm, self.kind = path, norm, kind
        self.eps = float(getattr(norm, "eps", 0.0) or 0.0)
        self.source = answering_for(norm, kind)

    @property
    def buffers(self) -> dict[str, Tensor]:
        buffers: dict[str, Tensor] = self.source.running_buffers()
        return buffers

    @property
    def size(self) -> int:
        """How many means or variances the buffers hold."""
        return next(iter(self.buffers.values())).shape[0]

    @property
    def device(self) -> torch.device:
        return next(iter(self.buffers.values())).device

    # ---------------------------------------------------------------- from the input

    def fits(self, x: Tensor) -> bool:
        """Whether x can be the input; if not, the norm has its own way to say so."""
        channels = getattr(self.norm, "channels", None)
        return x.shape[1] == (self.size if channels is None else channels)

    def table(self, x: Tensor, valid: Tensor | None = None) -> Moments:
        """The moments (N, K) of each image, in float64: of valid positions, given or by the block
        of masks around."""
        valid = valid_positions(self.norm, x) if valid is None else valid
        x = x.cpu() if x.device.type == "mps" else x  # which has no float64
        statistics = self.source.sample_statistics
        try:
            if valid is None:
                return _joined([statistics(_moments(part), part) for part in _chunks(x)])
            tables, rest = [], valid.to(x.device)  # of a padded batch
            for part in _chunks(blank(x, rest)):
                mask, rest = rest[: len(part)], rest[len(part) :]
                tables.append(statistics(_moments(part, mask), part))
            return _joined(tables)
        except ShapeError as error:
            raise ShapeError(f"{self.path or 'The norm'}: {error}") from error

    def pooled(self, table: Moments, x: Tensor) -> Moments:
        """From the moments (N, C) of x to the statistics of all of it, (1, K)."""
        pooled: Moments = self.source.sample_statistics(table, x).pooled(samples=None)
        return pooled

    def stored(self, statistics: Moments) -> Moments:
        """Statistics with the variance as it is stored: unbiased, as torch.nn does, or biased."""
        correction = self.source.running_correction
        if not correction:
            return statistics
        count = statistics.count
        less = count - correction
        factor = count / (less.clamp(min=1) if isinstance(less, Tensor) else max(less, 1))
        return Moments(statistics.mean, statistics.var * factor, count)

    # ---------------------------------------------------------------- from and into the buffers

    def read(self) -> Moments:
        """The buffers as mean and variance (1, K), whatever they hold: it may be below 0."""
        wide = {n: b.detach().to(widest(b.device), copy=True) for n, b in self.buffers.items()}
        mean, var = self.source.decode_statistics(wide)
        return Moments(mean[None], var[None], 1)

    def held(self) -> tuple[Tensor, Tensor]:
        """Mean and variance that the buffers hold now, (K,), in float64."""
        moments = self.read()
        return moments.mean[0], moments.var[0].clamp(min=0)

    def put(self, statistics: Moments) -> None:
        """Write a mean and a variance, tables (1, K), as they are."""
        self._write(self.source.encode_statistics(statistics.mean[0], statistics.var[0]))

    def write(self, merged: MergedMoments, batches: int) -> None:
        """Put exact statistics into the buffers, whose memory stays.

        The counter weighs all batches so far if momentum is None, and moves the ramps of
        batch renormalization; so it becomes the number of batches measured only where it was less.
        """
        self._write(self.values(merged))
        counter = self.source.batch_counter()
        if counter is not None:
            with torch.no_grad():
                counter.clamp_(min=batches)

    def values(self, merged: MergedMoments) -> dict[str, Tensor]:
        """What the buffers should hold, in float64, or an error if they cannot hold it."""
        correction = self.source.running_correction
        if bool((merged.count <= correction).any()):
            raise ShapeError(
                f"{self.path or 'The norm'} has seen a single value per channel, which has no "
                "variance. Give more images."
            )
        values = self.source.encode_statistics(merged.mean, merged.unbiased(correction))
        for name, buffer in self.buffers.items():
            value = values[name]
            if value.shape != buffer.shape:
                raise OptionError(
                    f"{self.path} keeps {tuple(buffer.shape)} in {name}, "
                    f"the statistics are {tuple(value.shape)}: they are of another layer."
                )
            if not bool(torch.isfinite(value.to(buffer.dtype)).all()):
                raise OptionError(
                    f"{self.path}: the statistics are not finite in {buffer.dtype}. "
                    "Look for overflow in the data or the layers before it."
                )
        return dict(values)

    def _write(self, values: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, buffer in self.buffers.items():
                buffer.copy_(values[name])


def statistics_of(path: str, norm: nn.Module, kind: str) -> NormStatistics | None:
    """The statistics of a norm that keeps any; None if there are none, or of an unknown form."""
    known = isinstance(norm, Normalizer) or kind in STORED_AS_TORCH
    found = NormStatistics(path, norm, kind) if known else None
    return found if found is not None and found.buffers else None


def pooled_statistics_of(norm: nn.Module, kind: str | None = None) -> NormStatistics | None:
    """The statistics of a norm that keeps a mean and a variance over samples; else None.

    A norm of no known kind is taken at the word of its buffers' names. Instance norms average over
    samples what they never pool, so theirs are left out; and lazy norms have none yet.
    """
    found = NormStatistics("", norm, kind or kind_of(norm) or "other")
    lazy = any(isinstance(b, nn.UninitializedBuffer) for b in found.buffers.values())
    pooled = getattr(found.source, "pooled_statistics", True)
    return found if pooled and not lazy and len(found.buffers) == 2 else None


def running_moments(norm: nn.Module) -> Moments | None:
    """The running statistics of a norm as mean and variance, tables (1, K); None without any."""
    found = pooled_statistics_of(norm)
    return None if found is None else found.read()


def channel_moments(x: Tensor, axis: int = 1) -> Moments:
    """Mean and variance of each sample and channel, tables (N, C) in the widest number type."""
    if x.layout is not torch.strided:  # a sparse input of the model
        x = x.to_dense()
    return _joined([_moments(part) for part in _chunks(x.movedim(axis, 1))])


def _moments(x: Tensor, valid: Tensor | None = None) -> Moments:
    """As the specification computes them, whatever backend is forced."""
    x = dense(x)
    layout = Channels.of(x) if valid is None else MaskedCells(Channels.of(x), valid)
    return Moments(*plain.moments(x, layout), layout.count)


def _joined(parts: list[Moments]) -> Moments:
    """Rows one below the other; counts are the same for all of them, or masks tell them."""
    mean, var = torch.cat([p.mean for p in parts]), torch.cat([p.var for p in parts])
    counts = [p.count for p in parts if isinstance(p.count, Tensor) and p.count.dim() == 2]
    return Moments(mean, var, torch.cat(counts) if counts else parts[0].count)


def _chunks(x: Tensor) -> Iterator[Tensor]:
    """A few images at a time: their wide copy must not need more memory than the model."""
    each = max(1, AT_ONCE // max(x[0].numel(), 1))
    for part in x.detach().split(each):
        yield part.to(widest(x.device))
