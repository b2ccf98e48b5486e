"""What norms keep: how their statistics come from their input, and into their buffers.

A keeper turns the moments of a norm's input into a table with a row for each image and a column
for each running statistic, and statistics into what the buffers hold. Everything peculiar to a
layer is in keeping.py; here is what batch normalization keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from normkit.core.layout import Channels, Layout, dense
from normkit.core.moments import Moments
from normkit.core.precision import widest
from normkit.engine import plain
from normkit.errors import OptionError, ShapeError
from normkit.inspection.tally import Tally

AT_ONCE = 1 << 22  # values in float64 at a time: 32 MB, whatever the size of the activations


class Keeper:
    """A batch norm of torch.nn or timm, or anything that keeps statistics as they do."""

    second = "running_var"
    correction = 1  # what torch.nn stores is unbiased

    def __init__(self, path: str, norm: nn.Module, kind: str) -> None:
        self.path, self.norm, self.kind = path, norm, kind
        self.eps = float(getattr(norm, "eps", 0.0) or 0.0)

    # ---------------------------------------------------------------- from the input

    def fits(self, x: Tensor) -> bool:
        """Whether x can be the input; if not, the norm has its own way to say so."""
        channels = getattr(self.norm, "channels", None)
        if channels is None:
            channels = self.size
        return x.dim() > 1 and x.shape[1] == channels and x.numel() > 0

    def table(self, x: Tensor) -> Moments:
        """The moments (N, K) of each image, in float64."""
        x = x.cpu() if x.device.type == "mps" else x  # which has no float64
        return _joined([self.columns(moments_of(part), part) for part in _chunks(x)])

    def columns(self, table: Moments, x: Tensor) -> Moments:
        """From the moments (N, C) of x to those of what is kept, (N, K)."""
        return table

    def pooled(self, table: Moments, x: Tensor) -> Moments:
        """From the moments (N, C) of x to the statistics of all of it, (1, K)."""
        return self.columns(table, x).pooled(samples=None)

    # ---------------------------------------------------------------- the buffers

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The running statistics by name; either may be missing, as in EvoNorm."""
        names = ("running_mean", self.second)
        found = {name: getattr(self.norm, name, None) for name in names}
        return {name: b for name, b in found.items() if isinstance(b, Tensor)}

    @property
    def size(self) -> int:
        """K, how many means or variances there are."""
        return next(iter(self.buffers.values())).shape[0]

    @property
    def counter(self) -> Tensor | None:
        counter = getattr(self.norm, "num_batches_tracked", None)
        return counter if isinstance(counter, Tensor) else None

    def read(self) -> Moments:
        """The buffers as mean and variance (1, K), whatever they hold: it may be below 0."""
        given = self.buffers.items()
        found = {name: b.detach().to(widest(b.device), copy=True) for name, b in given}
        any_one = next(iter(found.values()))
        mean = found.get("running_mean", torch.zeros_like(any_one))
        second = found.get(self.second, torch.ones_like(any_one))
        return Moments(mean[None], self.as_variance(mean, second)[None], 1)

    def held(self) -> tuple[Tensor, Tensor]:
        """Mean and variance that the buffers hold now, (K,), in float64."""
        found = self.read()
        return found.mean[0], found.var[0].clamp(min=0)

    def put(self, statistics: Moments) -> None:
        """Write a mean and a variance, tables (1, K), as they are."""
        self._write(self.as_buffers(statistics.mean[0], statistics.var[0]))

    def stored(self, statistics: Moments) -> Moments:
        """Statistics with the variance as it is stored: unbiased, as torch.nn does, or biased."""
        if not self.correction:
            return statistics
        count = statistics.count
        less = count - self.correction
        factor = count / (less.clamp(min=1) if isinstance(less, Tensor) else max(less, 1))
        return Moments(statistics.mean, statistics.var * factor, count)

    def as_variance(self, mean: Tensor, second: Tensor) -> Tensor:
        """The variance, from what the second buffer holds."""
        return second

    def as_buffers(self, mean: Tensor, var: Tensor) -> dict[str, Tensor]:
        """What the buffers hold for a mean and a variance."""
        return {"running_mean": mean, self.second: var}

    # ---------------------------------------------------------------- a tally into the buffers

    def values(self, tally: Tally) -> dict[str, Tensor]:
        """What the buffers should hold, in float64."""
        if bool((tally.count <= self.correction).any()):
            raise ShapeError(
                f"{self.path or 'The norm'} has seen a single value per channel, which has no "
                "variance. Give more images."
            )
        return self.as_buffers(tally.mean, tally.unbiased(self.correction))

    def write(self, tally: Tally, batches: int) -> None:
        """Put statistics into the buffers, whose memory stays; the counter is never lowered.

        The counter weighs all batches so far if momentum is None, and moves the ramps of
        batch_renorm; so it becomes the number of batches measured only where it was less.
        """
        self._write(self.checked(tally))
        if self.counter is not None:
            with torch.no_grad():
                self.counter.clamp_(min=batches)

    def checked(self, tally: Tally) -> dict[str, Tensor]:
        """The values, or an error if the buffers cannot hold them."""
        values = self.values(tally)
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
        return values

    def _write(self, values: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, buffer in self.buffers.items():
                buffer.copy_(values[name])


def table_of(x: Tensor, axis: int = 1) -> Moments:
    """Mean and variance of each sample and channel, tables (N, C) in the widest number type."""
    return _joined([moments_of(part) for part in _chunks(x.movedim(axis, 1))])


def moments_of(x: Tensor, cells: Callable[[Tensor], Layout] = Channels.of) -> Moments:
    """The moments of each cell, as the specification computes them, whatever backend is forced."""
    x = dense(x)
    layout = cells(x)
    return Moments(*plain.moments(x, layout), layout.count)


def _joined(parts: list[Moments]) -> Moments:
    """Rows one below the other; counts are the same for all of them."""
    mean, var = torch.cat([p.mean for p in parts]), torch.cat([p.var for p in parts])
    return Moments(mean, var, parts[0].count)


def _chunks(x: Tensor) -> Iterator[Tensor]:
    """A few images at a time: their wide copy must not need more memory than the model."""
    each = max(1, AT_ONCE // max(x[0].numel(), 1))
    for part in x.detach().split(each):
        yield part.to(widest(x.device))
