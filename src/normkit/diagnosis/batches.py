"""Batches with a target, and the loss of a model on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from normkit.errors import OptionError, ShapeError
from normkit.inspection import run
from normkit.inspection.batches import (
    device_of,
    inputs_of,
    moved,
    naming,
    refuse_no_batches,
    samples_in,
    some_of,
)
from normkit.inspection.calling import Call, Forward, images_in
from normkit.inspection.quiet import refuse_meta

Loss = Callable[[Any, Any], Any]
NO_TARGET = object()
HINT = (
    "Batches are expected as (inputs, target), inputs alone, or a mapping of keyword arguments; "
    "inputs as a tensor, or a tuple or mapping of arguments. For others try "
    "forward=lambda model, batch: …"
)


@dataclass(frozen=True, eq=False)
class Batch:
    """One batch: what the model gets, and what the loss gets beside the model's output."""

    inputs: Any  # a tensor, a tuple of positional or a mapping of keyword arguments
    target: Any

    @property
    def size(self) -> int:
        """How many samples there are, by the first tensor."""
        return samples_in(self.inputs)


def read_batch(given: Any, model: nn.Module | None = None, forward: Forward | None = None) -> Batch:
    """A tensor, (inputs, target), or a mapping of keyword arguments.

    The loss gets the second part of a pair, or the rest as a tuple if there is more. A loss for
    batches that are no pairs gets the batch itself. The whole batch is for ``forward``, if any.
    """
    inputs = inputs_of(given, model)
    images = None if model is None else images_in(model, inputs)
    if forward is not None or images is not None:
        batch = inputs if forward is None else given
        inputs = Call(forward or run, batch, None if images is None else len(images))
    if isinstance(given, tuple | list) and images is not given:
        rest = given[1:]
        return Batch(inputs, NO_TARGET if not rest else rest[0] if len(rest) == 1 else tuple(rest))
    return Batch(inputs, given if isinstance(given, Mapping) else NO_TARGET)


def each_batch(
    batches: Iterable[Any],
    model: nn.Module,
    most: int | None = None,
    forward: Forward | None = None,
) -> Iterator[Batch]:
    """The batches on the model's device, at most ``most``; none at all is an error."""
    if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 1):
        raise OptionError(f"max_batches expects a number of at least 1 or None, got {most!r}.")
    refuse_no_batches(batches)
    refuse_meta(model)
    device = device_of(model)
    for given in some_of(islice(batches, most)):
        yield read_batch(moved(given, device), model, forward)


def output_of(model: nn.Module, batch: Batch, number: int) -> Any:
    """What the model returns; an error that names the batch, counted from 1, if it fails."""
    with naming(batch.inputs, number, HINT):
        return run(model, batch.inputs)


def loss_of(loss: Loss | None, output: Any, batch: Batch, number: int) -> float:
    """The loss of a batch; cross-entropy for logits and classes unless a function is given."""
    if loss is None:
        return _cross_entropy(output, batch.target, number)
    target = batch.inputs if batch.target is NO_TARGET else batch.target
    found = loss(output, target)
    value = found.detach() if isinstance(found, Tensor) else found
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ShapeError(
            f"The loss of a batch is expected to be one number, got {tuple(value.shape)}. "
            "Try the mean over the batch."
        )
    return float(value)


def _cross_entropy(output: Any, target: Any, number: int) -> float:
    if not isinstance(output, Tensor) or not isinstance(target, Tensor):
        raise OptionError(
            "Without a loss, batches (x, y) and a model that returns logits are expected, got "
            f"{_kind(output)} for {_kind(target)}. Try loss=lambda output, target: …"
        )
    try:
        return float(F.cross_entropy(output.detach().float(), target))
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        raise ShapeError(
            f"Cross-entropy cannot be computed for batch {number}: logits {tuple(output.shape)}, "
            f"targets {tuple(target.shape)} of {target.dtype}. Try loss=lambda output, target: …"
        ) from error


def _kind(value: Any) -> str:
    return "no target" if value is NO_TARGET else f"a {type(value).__name__}"
