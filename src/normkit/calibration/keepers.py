"""What each kind of norm keeps: how its statistics come from its input, and into its buffers.

A keeper turns the input of a norm into a table of moments with a row for each image and a column
for each running statistic, and a tally of all images into the buffers. Everything peculiar to a
layer is in keeping.py; here is what batch normalization keeps.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from normkit.calibration.tally import Tally
from normkit.core.layout import Channels, Layout
from normkit.core.moments import Moments
from normkit.engine import plain
from normkit.errors import OptionError, ShapeError

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
            channels = next(iter(self.buffers.values())).shape[0]
        return x.dim() > 1 and x.shape[1] == channels and x.numel() > 0

    def table(self, x: Tensor) -> Moments:
        """The moments (N, K) of each image, in float64."""
        parts = [self.part(chunk.to(torch.float64)) for chunk in _chunks(x)]
        count = parts[0].count
        if isinstance(count, Tensor) and count.dim() > 1:
            count = torch.cat([torch.as_tensor(part.count) for part in parts])
        return Moments(
            torch.cat([part.mean for part in parts]), torch.cat([part.var for part in parts]), count
        )

    def part(self, x: Tensor) -> Moments:
        """The moments of a few images."""
        return moments_of(x, Channels.of(x))

    # ---------------------------------------------------------------- the buffers

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The running statistics by name; either may be missing, as in EvoNorm."""
        names = ("running_mean", self.second)
        found = {name: getattr(self.norm, name, None) for name in names}
        return {name: b for name, b in found.items() if isinstance(b, Tensor)}

    @property
    def counter(self) -> Tensor | None:
        counter = getattr(self.norm, "num_batches_tracked", None)
        return counter if isinstance(counter, Tensor) else None

    def values(self, tally: Tally) -> dict[str, Tensor]:
        """What the buffers should hold, in float64."""
        if bool((tally.count <= self.correction).any()):
            raise ShapeError(
                f"{self.path or 'The norm'} has seen a single value per channel, which has no "
                "variance. Give more images."
            )
        return {"running_mean": tally.mean, "running_var": tally.unbiased(self.correction)}

    def held(self) -> tuple[Tensor, Tensor]:
        """Mean and variance that the buffers hold now, in float64."""
        mean, second = self._both()
        return mean, second

    def write(self, tally: Tally, batches: int) -> None:
        """Put statistics into the buffers, whose memory stays; the counter is never lowered.

        The counter weighs all batches so far if momentum is None, and moves the ramps of
        batch_renorm; so it becomes the number of batches measured only where it was less.
        """
        values = self.checked(tally)
        with torch.no_grad():
            for name, buffer in self.buffers.items():
                buffer.copy_(values[name])
            if self.counter is not None:
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

    def _both(self) -> tuple[Tensor, Tensor]:
        found = self.buffers
        any_one = next(iter(found.values()))
        mean = found.get("running_mean", torch.zeros_like(any_one))
        second = found.get(self.second, torch.ones_like(any_one))
        return mean.to(torch.float64), second.to(torch.float64)


def moments_of(x: Tensor, layout: Layout) -> Moments:
    return Moments(*plain.moments(x, layout), layout.count)


def _chunks(x: Tensor) -> Iterator[Tensor]:
    """A few images at a time: their float64 copy must not need more memory than the model."""
    if x.device.type == "mps":  # which has no float64
        x = x.cpu()
    each = max(1, AT_ONCE // max(x[0].numel(), 1))
    yield from x.detach().split(each)
