"""A gap between two losses, and how it is shared out among layers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

SHOWN = 5  # layers
TINY = 1e-3  # part of the loss that is not worth a word


@dataclass(frozen=True)
class Losses:
    """The loss of each batch, and how many samples it had."""

    values: tuple[float, ...]
    sizes: tuple[int, ...]

    @property
    def mean(self) -> float:
        """Over all samples; infinite if a batch has no finite loss."""
        total = sum(v * n for v, n in zip(self.values, self.sizes, strict=True))
        mean = total / sum(self.sizes)
        return math.inf if math.isnan(mean) else mean

    @property
    def standard_error(self) -> float:
        """Of the mean, from how much the batches differ; NaN for a single batch."""
        n = len(self.values)
        if n < 2 or not all(map(math.isfinite, self.values)):
            return math.nan
        weights = [size / sum(self.sizes) for size in self.sizes]
        square = sum((w * (v - self.mean)) ** 2 for w, v in zip(weights, self.values, strict=True))
        return math.sqrt(square * n / (n - 1))

    def __sub__(self, other: Losses) -> Losses:
        pairs = zip(self.values, other.values, strict=True)
        return Losses(tuple(_less(a, b) for a, b in pairs), self.sizes)


def _less(a: float, b: float) -> float:
    """a − b, where NaN is as bad as infinite, and two infinite losses are equally bad."""
    a, b = (math.inf if math.isnan(v) else v for v in (a, b))
    return 0.0 if a == b else a - b


@dataclass(frozen=True, eq=False)
class GapAttribution:
    """How much of the gap between eval and train mode enters at which norm. ``print`` it.

    ``shares`` by path, the largest first: 0.82 is 82 % of the gap. A negative share makes the gap
    smaller. ``contributions`` are the same in units of the loss.
    """

    batch: Losses  # with batch statistics, as in train mode
    running: Losses  # with running statistics, as in eval mode
    shares: dict[str, float]
    contributions: dict[str, float]
    method: str
    swap: str | None = None

    def __post_init__(self) -> None:
        ranked = sorted(self.shares, key=lambda path: -self.shares[path])
        for name in ("shares", "contributions"):
            found = getattr(self, name)
            object.__setattr__(self, name, {path: found[path] for path in ranked})

    @property
    def train_loss(self) -> float:
        return self.batch.mean

    @property
    def eval_loss(self) -> float:
        return self.running.mean

    @property
    def gap(self) -> float:
        """eval_loss − train_loss."""
        return (self.running - self.batch).mean

    @property
    def standard_error(self) -> float:
        """Of the gap, from how much it differs between batches; NaN for a single batch."""
        return (self.running - self.batch).standard_error

    @property
    def is_gap(self) -> bool:
        """Whether eval mode is worse by more than two standard errors, and more than rounding."""
        error = self.standard_error
        return self.gap > max(TINY * abs(self.train_loss), 0.0 if math.isnan(error) else 2 * error)

    @property
    def worst(self) -> str:
        """The norm with the largest share."""
        return next(iter(self.shares))

    def __str__(self) -> str:
        count, samples = len(self.batch.sizes), sum(self.batch.sizes)
        batches = "1 batch" if count == 1 else f"{count} batches"
        said = [
            f"The loss is {self.train_loss:.4g} with batch statistics and {self.eval_loss:.4g} "
            f"with running ones: a gap of {self.gap:.4g} ({batches}, {samples} samples)."
        ]
        if not self.is_gap:
            return f"{said[0]}\nThat is no gap worth attributing."
        for path, share in list(self.shares.items())[:SHOWN]:
            share = round(share, 2) + 0.0  # no −0 %
            said.append(f"{share:>7.0%} of the gap enters at {path or 'the model itself'}")
        if len(self.shares) > SHOWN:
            rest = sum(list(self.shares.values())[SHOWN:])
            said.append(f"{rest:>7.0%} at {len(self.shares) - SHOWN} others")
        if self.method == "esm":
            said.append('Judged by estimation shift; method="swap" measures the loss.')
        return "\n".join(said)


def share_out(contributions: Mapping[str, float], gap: float) -> dict[str, float]:
    """Contributions as shares of the gap; of an infinite one only infinite parts count."""
    if math.isfinite(gap):
        return {path: c / gap if gap else 0.0 for path, c in contributions.items()}
    infinite = [path for path, c in contributions.items() if c == gap]
    return {path: 1 / len(infinite) if path in infinite else 0.0 for path in contributions}
