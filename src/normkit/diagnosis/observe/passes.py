"""Running a model on batches, with norms on running or on batch statistics, and its losses."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from normkit.core.moments import Moments
from normkit.diagnosis.observe.norm_record import NormRecord, watch_norms
from normkit.errors import NonFiniteWarning, NormkitError, OptionError, ShapeError
from normkit.inspection import Site, kind_of, undisturbed
from normkit.inspection.batches import NO_TARGET, LoaderBatch, run_batch
from normkit.inspection.statistics import MomentsAccumulator, channel_moments

Loss = Callable[[Any, Any], Any]
IGNORED = -100  # the class that cross-entropy leaves out
KEPT = 64  # batches whose statistics are kept one by one


# -------------------------------------------------------------------- losses


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
        """The differences; NaN is as bad as infinite, and two infinite losses are equally bad."""

        def less(a: float, b: float) -> float:
            a, b = (math.inf if math.isnan(v) else v for v in (a, b))
            return 0.0 if a == b else a - b

        return Losses(tuple(map(less, self.values, other.values)), self.sizes)


def losses_of(
    model: nn.Module, batches: Sequence[LoaderBatch], norms: Iterable[nn.Module], loss: Loss | None
) -> Losses:
    """The loss of each batch, these norms using its own statistics. Nothing has happened then.

    Every batch starts from the same buffers and random state, so that passes can be compared.
    """
    norms, values = list(norms), []
    for number, batch in enumerate(batches, 1):
        with undisturbed(model), using_batch(norms):
            output = run_batch(model, batch, number)
            values.append(loss_of(loss, output, batch, number))
    return Losses(tuple(values), tuple(batch.size for batch in batches))


def loss_of(loss: Loss | None, output: Any, batch: LoaderBatch, number: int) -> float:
    """The loss of a batch; cross-entropy for logits and classes unless a function is given."""
    if loss is None:
        return float(_cross_entropy(output, batch.target, number, "mean"))
    value = loss(output, batch.inputs if batch.target is NO_TARGET else batch.target)
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ShapeError(
            f"The loss of a batch is expected to be one number, got {tuple(value.shape)}. "
            "Try the mean over the batch."
        )
    return float(value)


def _losses(loss: Loss | None, output: Any, batch: LoaderBatch, number: int) -> Tensor:
    """Of each sample if it is a cross-entropy of classes, else of the batch."""
    if loss is not None:
        return torch.tensor([loss_of(loss, output, batch, number)])
    each = _cross_entropy(output, batch.target, number, "none")
    return each.flatten(1).mean(1) if each.dim() > 1 else each


def _cross_entropy(output: Any, target: Any, number: int, reduction: str) -> Tensor:
    if not isinstance(output, Tensor) or not isinstance(target, Tensor):
        given = "no target" if target is NO_TARGET else f"a {type(target).__name__}"
        raise OptionError(
            "Without a loss, batches (x, y) and a model that returns logits are expected, got "
            f"a {type(output).__name__} for {given}. Try loss=lambda output, target: …"
        )
    _check_labels(output, target, number)
    try:
        return F.cross_entropy(output.detach().float(), target, reduction=reduction)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        raise ShapeError(
            f"Cross-entropy cannot be computed for batch {number}: logits {tuple(output.shape)}, "
            f"targets {tuple(target.shape)} of {target.dtype}. Try loss=lambda output, target: …"
        ) from error


def _check_labels(output: Tensor, target: Tensor, number: int) -> None:
    """Classes that the model has no output for: on a GPU they would end the process."""
    shapes_fit = output.dim() > 1 and target.dim() == output.dim() - 1
    if not shapes_fit or target.is_floating_point() or output.shape[1] == 1:
        return  # no classes: cross-entropy will say what it misses
    classes = target[target != IGNORED]
    if not classes.numel():
        return
    low, high = int(classes.min()), int(classes.max())
    if low < 0 or high >= output.shape[1]:
        raise OptionError(
            f"loader: labels of batch {number} go from {low} to {high}, but the model gives "
            f"{output.shape[1]} classes, 0 to {output.shape[1] - 1}. Try labels from 0, "
            f"{IGNORED} for what is to be ignored, or loss=lambda output, target: …"
        )


def why_no_loss(loss: Loss | None, model: nn.Module, batch: LoaderBatch) -> str:
    """Why no loss can be computed, "" if it can; a loss that was given and fails is an error."""
    with undisturbed(model):
        output = run_batch(model, batch, 1)
    if loss is None and isinstance(output, Tensor) and isinstance(batch.target, Tensor):
        _check_labels(output, batch.target, 1)  # is no lack of a loss, but a mistake
    try:
        _losses(loss, output, batch, 1)
    except NormkitError as error:
        if loss is not None:
            raise
        return "there is no target" if batch.target is NO_TARGET else str(error)
    except Exception as error:
        given = batch.inputs if batch.target is NO_TARGET else batch.target
        raise OptionError(
            f"loss= fails on batch 1 with {type(error).__name__}: {error}. It was called with the "
            f"model's output, {_in_short(output)}, and the target, {_in_short(given)}."
        ) from error
    return ""


def _in_short(value: Any) -> str:
    shape = f" {tuple(value.shape)}" if isinstance(value, Tensor) else ""
    return f"a {type(value).__name__}{shape}"


@contextmanager
def using_batch(norms: Iterable[nn.Module]) -> Iterator[None]:
    """Training mode for these norms alone, not for a drop layer inside them.

    To be used where modes and buffers are restored afterwards. Batches that are not finite are no
    news here, and a layer that warns once keeps its warning for the training.
    """
    parts = [m for norm in norms for m in norm.modules() if m is norm or kind_of(m) is not None]
    warned = {id(part): part._warned for part in parts if hasattr(part, "_warned")}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NonFiniteWarning)
            for part in parts:
                part.training = True
            yield
    finally:
        for part in parts:
            if id(part) in warned:
                part._warned = warned[id(part)]


# -------------------------------------------------------------------- a pass


class PassRecord(NormRecord):
    """What one norm got: of each batch, and of each of its calls in a forward."""

    def __init__(self, site: Site, act: nn.Module | str | None) -> None:
        super().__init__(site, act, frozenset({"dead"}), 0)
        self.of_batches: list[Moments] = []  # of the first call, as the norm keeps them
        self.of_calls: list[MomentsAccumulator] = []  # over all batches, by number of the call
        self.shape: torch.Size | None = None  # of the first input
        self.call = 0  # in this forward

    def take_input(self, x: Tensor) -> None:
        self.calls += 1
        self.shape = self.shape or x.shape
        table = channel_moments(x, self.site.channel_axis)
        self.channels.add(table.pooled(samples=None))
        if self.statistics is None:
            return
        pooled = self.statistics.pooled(table, x)
        if self.call == len(self.of_calls):
            self.of_calls.append(MomentsAccumulator())
        self.of_calls[self.call].add(pooled)
        if self.call == 0 and len(self.of_batches) < KEPT:
            self.of_batches.append(pooled)
        self.expected.add(pooled)
        self.call += 1


class ModelPass:
    """What was seen while a model ran: norms by path, in the order of calls, and losses."""

    def __init__(self) -> None:
        self.norms: dict[str, PassRecord] = {}
        self.losses: list[Tensor] = []  # of each sample, or of each batch
        self.finite = True  # whether the output was

    @property
    def loss(self) -> Tensor | None:
        """All losses in one tensor; None if there are none."""
        return torch.cat(self.losses) if self.losses else None


def run_pass(
    model: nn.Module,
    sites: Iterable[Site],
    batches: Iterable[LoaderBatch],
    *,
    on_batch: Iterable[nn.Module] = (),
    training: Iterable[nn.Module] = (),
    loss: Loss | None = None,
    losses: bool = False,
) -> ModelPass:
    """Run the model in eval mode, the norms of ``on_batch`` on batch statistics. Changes nothing.

    Other modules, ``training``, can be in training mode as well. Each batch starts from the
    buffers as they are now.
    """
    result, norms = ModelPass(), list(on_batch)
    with watch_norms(model, sites, PassRecord) as result.norms:
        for number, batch in enumerate(batches, 1):
            with undisturbed(model), using_batch(norms):
                for module in training:
                    module.training = True
                for record in result.norms.values():
                    record.call = 0
                output = run_batch(model, batch, number)
            if isinstance(output, Tensor):
                result.finite &= bool(torch.isfinite(output).all())
            if losses:
                result.losses.append(_losses(loss, output, batch, number))
    return result
