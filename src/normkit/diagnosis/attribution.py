"""Where the gap between train and eval mode comes from."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from normkit.diagnosis.measures import esm, output_error, wide
from normkit.diagnosis.observe.collect import norms_of
from normkit.diagnosis.observe.norm_record import NormRecord, watch_norms
from normkit.diagnosis.observe.passes import Loss, Losses, losses_of
from normkit.errors import NothingToDo, OptionError, nearest
from normkit.inspection import Site
from normkit.inspection.batches import BatchReader, Forward, LoaderBatch
from normkit.inspection.foreign import measured
from normkit.inspection.run import call_counts

METHODS = ("output_error", "esm", "swap")
SWAPS = ("prefix", "to_batch", "to_running")
BATCHES = 16
SHOWN = 5  # layers
NEGLIGIBLE = 1e-3  # part of the loss that is not worth a word
WORST = 1e6  # error of what is not a number
Progress = Callable[[int, int], None]  # passes that are done, of how many


def attribute_gap(
    model: nn.Module,
    batches: Iterable[Any],
    loss: Loss | None = None,
    *,
    method: str = "output_error",
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

    Two methods take two passes over the batches, and share the gap out by how wrong each norm's
    running statistics are for what it gets while those below use the batch:
        "output_error"  by what they add to the norm's output, which has no unit (the default)
        "esm"           by the squares of the estimation shift magnitudes of means and deviations.
                        They have the unit of the activations: a norm of large inputs weighs more
                        than others, however little its shift does.
    "swap" measures the loss with norms switched one by one, a pass each:
        "prefix"      running → batch from the input upwards, each staying switched. Adds up to the
                      whole gap; a norm is judged with all below it right.
        "to_batch"    running → batch for one norm alone: what repairing it would win.
        "to_running"  batch → running for one norm alone: what it spoils by itself. Norms above
                      that use the batch may hide it.

    The first ``max_batches`` are kept in memory, so that each pass sees the same.
    ``forward(model, batch)`` is for batches of another form than ``diagnose`` reads.
    """
    for name, given, choices in (("method", method, METHODS), ("swap", swap, SWAPS)):
        if given not in choices:
            raise OptionError(f"Unknown {name} {given!r}. {nearest(str(given), choices)}")
    sites = [x for x in norms_of(model, where) if x.tracked and not measured(x).is_fixed]
    if not sites:
        raise NothingToDo(
            "None of these norms has running statistics that training would not use, so there "
            "is no gap for them to make. Print survey(model) to see what they are."
        )
    kept = list(BatchReader(model, batches, forward, max_batches=max_batches))
    by_module = {site.module: site for site in sites}
    first = BatchReader(model, [kept[0].as_given()])
    ordered = [by_module[module] for module in call_counts(first, list(by_module))]
    if not ordered:
        raise NothingToDo("None of the norms ran on the first batch.")
    meter = _LossMeter(model, kept, loss, progress)
    if method == "swap":
        return _by_swaps(meter, ordered, swap)
    return _by_statistics(meter, ordered, method)


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
            values = getattr(self, name)
            object.__setattr__(self, name, {path: values[path] for path in ranked})

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
        error = 0.0 if math.isnan(self.standard_error) else 2 * self.standard_error
        return self.gap > max(NEGLIGIBLE * abs(self.train_loss), error)

    @property
    def worst(self) -> str:
        """The norm with the largest share."""
        return next(iter(self.shares))

    def __str__(self) -> str:
        count, samples = len(self.batch.sizes), sum(self.batch.sizes)
        batches = "1 batch" if count == 1 else f"{count} batches"
        lines = [
            f"The loss is {self.train_loss:.4g} with batch statistics and {self.eval_loss:.4g} "
            f"with running ones: a gap of {self.gap:.4g} ({batches}, {samples} samples)."
        ]
        if not self.is_gap:
            return f"{lines[0]}\nThat is no gap worth attributing."
        for path, share in list(self.shares.items())[:SHOWN]:
            share = round(share, 2) + 0.0  # no −0 %
            lines.append(f"{share:>7.0%} of the gap enters at {path or 'the model itself'}")
        if len(self.shares) > SHOWN:
            rest = sum(list(self.shares.values())[SHOWN:])
            lines.append(f"{rest:>7.0%} at {len(self.shares) - SHOWN} others")
        if self.method != "swap":
            judged = "output error" if self.method == "output_error" else "estimation shift"
            lines.append(f'Judged by {judged}; method="swap" measures the loss.')
        return "\n".join(lines)


class _LossMeter:
    """The losses of all batches for a choice of norms that use batch statistics."""

    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[LoaderBatch],
        loss: Loss | None,
        progress: Progress | None,
    ) -> None:
        self.model, self.batches, self.loss, self.progress = model, batches, loss, progress
        self.done, self.total = 0, 2

    def __call__(self, on_batch: Sequence[Site]) -> Losses:
        if self.progress is not None:
            self.progress(self.done, self.total)
        norms = [site.module for site in on_batch]
        losses = losses_of(self.model, self.batches, norms, self.loss)
        self.done += 1
        if self.progress is not None and self.done == self.total:
            self.progress(self.done, self.total)
        return losses


def _by_swaps(meter: _LossMeter, sites: list[Site], swap: str) -> GapAttribution:
    meter.total = len(sites) + (1 if swap == "prefix" else 2)
    running = meter(())
    won: dict[str, Losses] = {}
    if swap == "prefix":
        batch = running
        for k, site in enumerate(sites, 1):
            before, batch = batch, meter(sites[:k])
            won[site.path] = before - batch
    else:
        batch = meter(sites)
        for k, site in enumerate(sites):
            others = sites[:k] + sites[k + 1 :]
            won[site.path] = (
                running - meter([site]) if swap == "to_batch" else meter(others) - batch
            )
    contributions = {path: losses.mean for path, losses in won.items()}
    shares = share_out(contributions, (running - batch).mean)
    return GapAttribution(batch, running, shares, contributions, "swap", swap)


def share_out(contributions: Mapping[str, float], gap: float) -> dict[str, float]:
    """Contributions as shares of the gap; of an infinite one only infinite parts count."""
    if math.isfinite(gap):
        return {path: c / gap if gap else 0.0 for path, c in contributions.items()}
    infinite = [path for path, c in contributions.items() if c == gap]
    return {path: 1 / len(infinite) if path in infinite else 0.0 for path in contributions}


def _by_statistics(meter: _LossMeter, sites: list[Site], method: str) -> GapAttribution:
    running = meter(())
    with watch_norms(
        meter.model, sites, lambda site, act: NormRecord(site, act, frozenset(), 0)
    ) as norms:
        batch = meter(sites)
    errors = {site.path: _error(norms.get(site.path), method) for site in sites}
    total = sum(errors.values())
    shares = {path: error / total if total > 0 else 0.0 for path, error in errors.items()}
    gap = (running - batch).mean
    contributions = {path: share * gap for path, share in shares.items()}
    return GapAttribution(batch, running, shares, contributions, method, None)


def _error(norm: NormRecord | None, method: str) -> float:
    """How wrong running statistics are: 0 if there is nothing to compare."""
    if norm is None or norm.kept is None or norm.expected.total is None:
        return 0.0
    if method == "esm":
        shift = esm(norm.kept, norm.expected.total)
        square = shift.mean.square() + shift.std.square()
        return float(square.nan_to_num(nan=WORST**2, posinf=WORST**2))
    error = output_error(norm.kept, norm.expected.total, norm.site.eps or 0.0)
    error = error.nan_to_num(nan=WORST, posinf=WORST)
    weight = getattr(norm.norm, "weight", None)
    if not isinstance(weight, Tensor) or weight.shape != error.shape:
        return float(error.mean())
    square = wide(weight).square()  # a channel counts as much as it is scaled
    return float((error * square).sum() / square.sum()) if square.sum() > 0 else 0.0
