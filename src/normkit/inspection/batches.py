"""Batches as loaders give them: one reader, and how a model is given a batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn

from normkit.errors import NormkitError, NothingToDo, OptionError, ShapeError
from normkit.inspection.checks import refuse_meta

Forward = Callable[[nn.Module, Any], Any]
NO_TARGET = object()
LISTS = ("list[", "List[", "typing.List[", "Sequence[", "typing.Sequence[")
DETECTION = "torchvision.models.detection"  # some of its models say it in a comment only
# of a model that is given what it does not expect
FAILURES = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError)
HINT = (
    "Batches are expected as (inputs, target), inputs alone, or a mapping of keyword arguments; "
    "inputs as a tensor, or a tuple or mapping of arguments. For others try "
    "forward=lambda model, batch: …"
)


class StopForward(BaseException):
    """Ends a forward of which nothing more is needed. No Exception: models catch those."""


@dataclass(frozen=True, eq=False)
class ModelCall:
    """A batch with a rule of its own for giving it to a model.

    ``samples`` is for what has no axis of samples, such as a list of images of several sizes.
    """

    forward: Forward
    batch: Any
    samples: int | None = None


@dataclass(frozen=True, eq=False)
class LoaderBatch:
    """One batch: what the model gets, and what a loss gets beside the model's output."""

    inputs: Any  # a tensor, a tuple of positional or a mapping of keyword arguments, or a ModelCall
    target: Any = NO_TARGET
    images: Sequence[Tensor] | None = None  # the inputs, if they are a list of images

    @property
    def size(self) -> int:
        """How many samples there are, by the first tensor."""
        return samples_in(self.inputs)

    def as_given(self) -> tuple[Any, ...]:
        """The batch in the form in which users give them."""
        return (self.inputs,) if self.target is NO_TARGET else (self.inputs, self.target)


class BatchReader:
    """The batches of a loader, read for a model: an iterable of ``LoaderBatch`` on its device.

    Each is a tensor, (inputs, target), or a mapping of keyword arguments; ``forward(model, batch)``
    is a rule for others. Reading ends after ``max_batches``, or with the batch that completes
    ``max_samples``. No batch at all is an error.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Iterable[Any],
        forward: Forward | None = None,
        *,
        max_batches: int | None = None,
        max_samples: int | None = None,
    ) -> None:
        if isinstance(batches, Tensor | Mapping | str) or not isinstance(batches, Iterable):
            raise OptionError(
                "Batches expected, such as a DataLoader or a list of (x, y), got "
                f"{type(batches).__name__}. Try [batch] for a single one."
            )
        if max_batches is not None and (type(max_batches) is not int or max_batches < 1):
            raise OptionError(
                f"max_batches expects a number of at least 1 or None, got {max_batches!r}."
            )
        if max_samples is not None and (isinstance(max_samples, bool) or max_samples < 1):
            raise OptionError(f"Expected images to be a positive number, got {max_samples!r}.")
        refuse_meta(model)
        self.model, self.forward, self.device = model, forward, device_of(model)
        self.max_batches, self.max_samples = max_batches, max_samples
        self._batches = batches

    def keep(self) -> None:
        """Make sure that the batches can be read again: an iterator becomes a list."""
        if iter(self._batches) is self._batches:
            self._batches = list(self._limited())

    def __iter__(self) -> Iterator[LoaderBatch]:
        empty = True
        for number, given in enumerate(self._limited(), 1):
            empty = False
            try:
                batch = read_batch(moved(given, self.device), self.model, self.forward)
            except ShapeError as error:
                raise ShapeError(f"Batch {number}: {error}") from error
            yield batch
        if empty:
            raise NothingToDo(
                "The loader gave no batches. A DataLoader with drop_last=True is empty if the data "
                "has fewer samples than a batch; an iterator is empty if it was used before."
            )

    def _limited(self) -> Iterator[Any]:
        """The batches as they are given, until there are enough."""
        samples = 0
        for given in islice(self._batches, self.max_batches):
            yield given
            if self.max_samples is not None:
                samples += read_batch(given, self.model, self.forward).size
                if samples >= self.max_samples:
                    return

    def run(self, batch: LoaderBatch, number: int) -> Any:
        return run_batch(self.model, batch, number)


def read_batch(
    given: Any, model: nn.Module | None = None, forward: Forward | None = None
) -> LoaderBatch:
    """A tensor, (inputs, target), or a mapping of keyword arguments.

    The loss gets the second part of a pair, or the rest as a tuple if there is more. A loss for
    batches that are no pairs gets the batch itself. The whole batch is for ``forward``, if any.
    """
    inputs = inputs_of(given, model)
    if model is not None and isinstance(inputs, list) and not inputs and takes_list(model):
        raise ShapeError("It has no images, expected a list of one or more.")
    images = None if model is None else images_in(model, inputs)
    if forward is not None or images is not None:
        batch = inputs if forward is None else given
        inputs = ModelCall(forward or call_model, batch, None if images is None else len(images))
    target = given if isinstance(given, Mapping) else NO_TARGET
    if isinstance(given, tuple | list) and images is not given and len(given) > 1:
        target = given[1] if len(given) == 2 else tuple(given[1:])
    return LoaderBatch(inputs, target, images)


def inputs_of(batch: Any, model: nn.Module | None = None) -> Any:
    """What of a batch is for the model.

    Of a tuple or list, as loaders give (inputs, target), the first part, which may itself be a
    tuple or mapping of arguments; else all of it: a tensor, or a mapping of keyword arguments. A
    list of nothing but images is no pair for a model that takes lists.
    """
    if not isinstance(batch, tuple | list):
        return batch
    if model is not None and images_in(model, batch) is not None:
        return batch
    if not batch:
        kind = type(batch).__name__
        raise ShapeError(f"A batch is an empty {kind}, expected a tensor or (inputs, target).")
    return batch[0]


def call_model(model: nn.Module, example: Any) -> Any:
    """The model's output for an example: a tensor, positional or keyword arguments, or a call.

    A list or tuple of tensors is one argument for a model whose forward says that it takes a list.
    """
    if isinstance(example, ModelCall):
        return example.forward(model, example.batch)
    if isinstance(example, Mapping):
        return model(**example)
    if not isinstance(example, tuple | list):
        return model(example)
    one = all(isinstance(x, Tensor) for x in example) and takes_list(model)
    return model(example) if one else model(*example)


def run_batch(model: nn.Module, batch: LoaderBatch, number: int) -> Any:
    """The model's output, None if it was stopped; an error of its own names the batch, from 1."""
    with explained(batch.inputs, number), suppress(StopForward):
        return call_model(model, batch.inputs)


@contextmanager
def explained(inputs: Any, number: int) -> Iterator[None]:
    """An error of the model inside becomes one that says which batch it was, and what to try."""
    try:
        yield
    except (torch.OutOfMemoryError, NotImplementedError):
        raise
    except FAILURES as error:
        if isinstance(error, NormkitError) and not isinstance(error, ShapeError):
            raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        shapes = [str(tuple(t.shape)) for t in tensors_in(inputs)][:3]
        came = " ".join(shapes) if shapes else type(inputs).__name__
        raise ShapeError(f"The model fails on batch {number}, {came}: {reason}. {HINT}") from error


def images_in(model: nn.Module, inputs: Any) -> Sequence[Tensor] | None:
    """The images, if inputs are a list of them for a model that takes a list; else None."""
    if not isinstance(inputs, tuple | list) or not inputs or not takes_list(model):
        return None
    return inputs if all(isinstance(x, Tensor) and x.dim() == 3 for x in inputs) else None


def takes_list(model: nn.Module) -> bool:
    """Whether the first argument of a model's forward is a list, as it says itself."""
    if type(model).__module__.startswith(DETECTION):
        return True
    try:
        first = next(iter(inspect.signature(model.forward).parameters.values()), None)
    except (TypeError, ValueError):
        return False
    annotation = None if first is None else first.annotation
    text = annotation if isinstance(annotation, str) else str(annotation)
    return annotation is list or text == "list" or text.startswith(LISTS)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in something nested, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from chain.from_iterable(tensors_in(part) for part in value.values())
    elif isinstance(value, tuple | list):
        yield from chain.from_iterable(tensors_in(part) for part in value)
    elif isinstance(value, ModelCall):
        yield from tensors_in(value.batch)


def samples_in(batch: Any) -> int:
    """How many samples there are: the length of the first tensor."""
    if isinstance(batch, ModelCall) and batch.samples is not None:
        return batch.samples
    first = next(tensors_in(batch), None)
    return 1 if first is None or first.dim() == 0 else first.shape[0]


def device_of(model: nn.Module) -> torch.device | None:
    """The device of a model; None if it has none, or several, among which it has to see itself."""
    devices = {t.device for t in chain(model.parameters(), model.buffers())}
    return devices.pop() if len(devices) == 1 else None


def moved(value: Any, device: torch.device | None) -> Any:
    """The same with all tensors on a device; its structure stays."""
    if device is None:
        return value
    # to the host, a copy that nobody waits for could be read before it is there
    return mapped(value, lambda x: x.to(device, non_blocking=device.type != "cpu"))


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same with all tensors changed; its structure stays."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {name: mapped(part, change) for name, part in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(part, change) for part in value))
    if isinstance(value, tuple | list):
        return type(value)(mapped(part, change) for part in value)
    return value
