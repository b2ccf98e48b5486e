"""Where the gap between train and eval mode comes from."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from normkit.diagnosis.measures import output_error
from normkit.diagnosis.measures.statistics import wide
from normkit.diagnosis.observe.collect import norms_of
from normkit.diagnosis.observe.norm_record import NormRecord
from normkit.diagnosis.observe.passes import Batch, Loss, each_batch, losses_of
from normkit.errors import NothingToDo, OptionError, nearest
from normkit.inspection import Site
from normkit.inspection.calling import Forward
from normkit.inspection.foreign import measured
from normkit.inspection.keeping import running_of

METHODS = ("esm", "swap")
SWAPS = ("prefix", "to_batch", "to_running")
BATCHES = 16
Progress = Callable[[int, int], None]  # passes that are done, of how many


def attribute_gap(
    model: nn.Module,
    batches: Iterable[Any],
    loss: Loss | None = None,
    *,
    method: str = "esm",
    swap: str = "prefix",
    where: Any = None,
    max_batches: int | None = BATCHES,
    forward: Forward | None = None,
    progress: Progress | None = None,
) -> GapAttribution:
    """Which norms the difference between batch and running statistics enters at. Changes nothing.

    The model is in eval mode, dropout off; its norms use running statistics, or those of each
    batch as in training. ``loss(output, target)`` is the mean over a batch (it gets the batch
    itself if that is no pair); without it, cross-entropy of (x, y).

    ``method="esm"`` takes two passes over the batches: the gap is shared out by how wrong each
    norm's running statistics are for what it gets while those below use the batch. "swap" measures
    the loss with norms switched one by one, a pass each:
        "prefix"      running → batch from the input upwards, each staying switched. Adds up to the
                      whole gap; a norm is judged with all below it right.
        "to_batch"    running → batch for one norm alone: what repairing it would win.
        "to_running"  batch → running for one norm alone: what it spoils by itself. Norms above
                      that use the batch may hide it.

    The first ``max_batches`` are kept in memory, so that each pass sees the same.
    ``forward(model, batch)`` is for batches of another form than ``diagnose`` reads.
    """
    for name, given, known in (("method", method, METHODS), ("swap", swap, SWAPS)):
        if given not in known:
            raise OptionError(f"Unknown {name} {given!r}. {nearest(str(given), known)}")
    sites = _switchable(norms_of(model, where))
    kept = list(each_batch(batches, model, max_batches, forward))
    ordered = _in_order(model, sites, kept[:1])
    measure = _LossMeter(model, kept, loss, progress)
    if method == "esm":
        return _by_shift(measure, ordered)
    return _by_swaps(measure, ordered, swap)


class _LossMeter:
    """The losses of all batches for a choice of norms that use batch statistics."""

    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[Batch],
        loss: Loss | None,
        progress: Progress | None,
    ) -> None:
        self.model, self.batches, self.loss, self.progress = model, batches, loss, progress
        self.done, self.total = 0, 2

    def __call__(self, on_batch: Sequence[Site]) -> Losses:
        if self.progress is not None:
            self.progress(self.done, self.total)
        norms = [site.module for site in on_batch]
        found = losses_of(self.model, self.batches, norms, self.loss)
        self.done += 1
        if self.progress is not None and self.done == self.total:
            self.progress(self.done, self.total)
        return found


def _switchable(sites: Sequence[Site]) -> list[Site]:
    """The norms that differ between train and eval mode."""
    found = [site for site in sites if site.tracked and not measured(site).is_fixed]
    if not found:
        raise NothingToDo(
            "None of these norms has running statistics that training would not use, so there "
            "is no gap for them to make. Print survey(model) to see what they are."
        )
    return found


def _in_order(model: nn.Module, sites: list[Site], batches: Sequence[Batch]) -> list[Site]:
    """The norms in the order in which they run; those that do not run are left out."""
    order: dict[str, Site] = {}
    with ExitStack() as stack:
        for site in sites:
            handle = site.module.register_forward_pre_hook(
                lambda *_, site=site: order.setdefault(site.path, site) and None
            )
            stack.callback(handle.remove)
        losses_of(model, batches, (), lambda *_: 0.0)
    if not order:
        raise NothingToDo("None of the norms ran on the first batch.")
    return list(order.values())


def _by_swaps(measure: _LossMeter, sites: list[Site], swap: str) -> GapAttribution:
    total = len(sites)
    measure.total = 1 + total if swap == "prefix" else 2 + total
    running = measure(())
    won: dict[str, Losses] = {}
    if swap == "prefix":
        before = running
        for k, site in enumerate(sites):
            after = measure(sites[: k + 1])
            won[site.path] = before - after
            before = after
        batch = before
    else:
        batch = measure(sites)
        for k, site in enumerate(sites):
            others = sites[:k] + sites[k + 1 :]
            won[site.path] = (
                running - measure([site]) if swap == "to_batch" else (measure(others) - batch)
            )
    contributions = {path: losses.mean for path, losses in won.items()}
    shares = share_out(contributions, (running - batch).mean)
    return GapAttribution(batch, running, shares, contributions, "swap", swap)


def _by_shift(measure: _LossMeter, sites: list[Site]) -> GapAttribution:
    running = measure(())
    watches = [NormRecord(site, None, frozenset(), 0) for site in sites]
    with ExitStack() as stack:
        for watch in watches:
            handle = watch.site.module.register_forward_pre_hook(
                lambda _, args, kwargs, watch=watch: watch.before(args, kwargs), with_kwargs=True
            )
            stack.callback(handle.remove)
        batch = measure(sites)
    errors = {watch.site.path: _error(watch) for watch in watches}
    total = sum(errors.values())
    shares = {path: error / total if total > 0 else 0.0 for path, error in errors.items()}
    gap = (running - batch).mean
    contributions = {path: share * gap for path, share in shares.items()}
    return GapAttribution(batch, running, shares, contributions, "esm", None)


def _error(watch: NormRecord) -> float:
    """Output error of the running statistics, channels weighted by the square of their scale."""
    running, expected = running_of(watch.site.norm), watch.expected.total
    if running is None or expected is None:
        return 0.0
    error = output_error(running, expected, watch.site.eps or 0.0)
    error = error.nan_to_num(nan=1e6, posinf=1e6)  # not a number is as wrong as can be
    weight = getattr(watch.site.norm, "weight", None)
    if not isinstance(weight, Tensor) or weight.shape != error.shape:
        return float(error.mean())
    square = wide(weight).square()
    return float((error * square).sum() / square.sum()) if square.sum() > 0 else 0.0


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
