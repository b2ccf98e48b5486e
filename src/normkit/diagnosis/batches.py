"""The batches a user gives, and how a model is run on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from normkit.errors import NormkitError, NothingToDo, OptionError, ShapeError
from normkit.inspection import run

Loss = Callable[[Any, Any], Any]
NO_TARGET = object()


@dataclass(frozen=True, eq=False)
class Batch:
    """One batch: what the model gets, and what the loss gets beside the model's output."""

    inputs: Any  # a tensor, a tuple of positional or a mapping of keyword arguments
    target: Any

    @property
    def size(self) -> int:
        """How many samples there are, by the first tensor."""
        found = next(tensors_in(self.inputs), None)
        return 1 if found is None or found.dim() == 0 else found.shape[0]


def read_batch(given: Any) -> Batch:
    """A tensor, (inputs, target), or a mapping of keyword arguments.

    Of a pair the first is for the model, and may itself be a tuple or mapping of arguments; the
    loss gets the second, or the rest as a tuple if there is more. A loss for batches that are no
    pairs gets the batch itself.
    """
    if isinstance(given, tuple | list):
        if not given:
            raise ShapeError("The loader gave an empty tuple, expected (inputs, target).")
        rest = given[1:]
        if not rest:
            return Batch(given[0], NO_TARGET)
        return Batch(given[0], rest[0] if len(rest) == 1 else tuple(rest))
    return Batch(given, given if isinstance(given, Mapping) else NO_TARGET)


def each_batch(
    batches: Iterable[Any], model: nn.Module, most: int | None = None
) -> Iterator[Batch]:
    """The batches on the model's device, at most ``most``; none at all is an error."""
    if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 1):
        raise OptionError(f"max_batches expects a number of at least 1 or None, got {most!r}.")
    if isinstance(batches, Tensor | Mapping | str) or not isinstance(batches, Iterable):
        kind = type(batches).__name__
        raise OptionError(
            f"Batches expected, such as a DataLoader or a list of (x, y), got {kind}. "
            "Try [batch] for a single one."
        )
    place = next((t.device for t in (*model.parameters(), *model.buffers())), None)
    some = False
    for given in islice(batches, most):
        some = True
        yield read_batch(given if place is None else moved(given, place))
    if not some:
        raise NothingToDo(
            "The loader gave no batches. A DataLoader with drop_last=True is empty if the data "
            "has fewer samples than a batch; an iterator is empty if it was used before."
        )


@contextmanager
def naming(batch: Batch, number: int) -> Iterator[None]:
    """An error of the model inside becomes one that names the batch and what is expected."""
    try:
        yield
    except (NormkitError, torch.OutOfMemoryError):
        raise
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        shapes = [tuple(t.shape) for t in tensors_in(batch.inputs)]
        came = shapes[0] if len(shapes) == 1 else shapes or type(batch.inputs).__name__
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ShapeError(
            f"The model cannot be run on batch {number}, whose input is {came}: {reason} "
            "Batches are expected as (inputs, target), inputs alone, or a mapping of keyword "
            "arguments."
        ) from error


def output_of(model: nn.Module, batch: Batch, number: int) -> Any:
    """What the model returns; an error that names the batch if it cannot be run."""
    with naming(batch, number):
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


def moved(given: Any, device: torch.device) -> Any:
    """The same with all tensors on a device."""
    if isinstance(given, Tensor):
        return given.to(device)
    if isinstance(given, tuple) and hasattr(given, "_fields"):
        return type(given)(*(moved(each, device) for each in given))
    if isinstance(given, tuple | list):
        return type(given)(moved(each, device) for each in given)
    if isinstance(given, Mapping):
        return {name: moved(each, device) for name, each in given.items()}
    return given


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in something nested."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_in(each)
    elif isinstance(value, tuple | list):
        for each in value:
            yield from tensors_in(each)
