"""Batches as loaders give them: what is in them, and models that fail on them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from normkit.errors import NormkitError, NothingToDo, OptionError, ShapeError
from normkit.inspection.calling import Call, images_in

SHOWN = 3
# of a model that is given what it does not expect
FAILURES = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError)


def refuse_no_batches(batches: Any) -> None:
    """An error for what cannot be gone through batch by batch."""
    if isinstance(batches, Tensor | Mapping | str) or not isinstance(batches, Iterable):
        raise OptionError(
            "Batches expected, such as a DataLoader or a list of (x, y), got "
            f"{type(batches).__name__}. Try [batch] for a single one."
        )


def some_of(batches: Iterable[Any]) -> Iterator[Any]:
    """The batches; none at all is an error."""
    empty = True
    for batch in batches:
        empty = False
        yield batch
    if empty:
        raise NothingToDo(
            "The loader gave no batches. A DataLoader with drop_last=True is empty if the data "
            "has fewer samples than a batch; an iterator is empty if it was used before."
        )


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
        raise ShapeError("A batch is an empty tuple, expected a tensor or (inputs, target).")
    return batch[0]


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in something nested, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from chain.from_iterable(tensors_in(part) for part in value.values())
    elif isinstance(value, tuple | list):
        yield from chain.from_iterable(tensors_in(part) for part in value)
    elif isinstance(value, Call):
        yield from tensors_in(value.batch)


def samples_in(batch: Any) -> int:
    """How many samples there are: the length of the first tensor."""
    if isinstance(batch, Call) and batch.samples is not None:
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
    if isinstance(value, Tensor):
        # to the host, a copy that nobody waits for could be read before it is there
        return value.to(device, non_blocking=device.type != "cpu")
    if isinstance(value, Mapping):
        return {name: moved(part, device) for name, part in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(moved(part, device) for part in value))
    if isinstance(value, tuple | list):
        return type(value)(moved(part, device) for part in value)
    return value


@contextmanager
def naming(batch: Any, number: int, hint: str) -> Iterator[None]:
    """An error of the model inside becomes one that says which batch it was, and what to try."""
    try:
        yield
    except (torch.OutOfMemoryError, NotImplementedError):
        raise
    except FAILURES as error:
        if isinstance(error, NormkitError) and not isinstance(error, ShapeError):
            raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        shapes = [str(tuple(t.shape)) for t in tensors_in(batch)][:SHOWN]
        came = " ".join(shapes) if shapes else type(batch).__name__
        raise ShapeError(f"The model fails on batch {number}, {came}: {reason}. {hint}") from error
