"""Batches as loaders give them, into a model as it takes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from normkit.errors import NormkitError, NothingToDo, OptionError, ShapeError
from normkit.inspection import run

Forward = Callable[[nn.Module, Any], Any]


class Feed:
    """Batches for a model: each is moved to its device and given to it.

    A tensor is the input; of a tuple or list, as loaders give (images, labels), the first part
    is, which may itself be a tuple or mapping of arguments; a mapping is keyword arguments.
    ``forward(model, batch)`` replaces that rule. A tensor or mapping alone is one batch.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Any,
        forward: Forward | None = None,
        images: int | None = None,
    ) -> None:
        if isinstance(batches, Tensor | Mapping):
            batches = [batches]
        if isinstance(batches, str) or not isinstance(batches, Iterable):
            raise OptionError(
                f"Expected batches, such as a DataLoader or a list of tensors, got "
                f"{type(batches).__name__}."
            )
        if images is not None and (isinstance(images, bool) or images < 1):
            raise OptionError(f"Expected images to be a positive number, got {images!r}.")
        self.model, self.batches, self.images = model, batches, images
        self.forward = forward or default_forward
        self.device = _device(model)

    def kept(self) -> None:
        """Make sure that the batches can be gone through again: an iterator is read into a list."""
        if iter(self.batches) is self.batches:
            self.batches = list(self._some())

    def __iter__(self) -> Iterator[Any]:
        yielded = False
        for batch in self._some():
            yielded = True
            yield move(batch, self.device)
        if not yielded:
            raise NothingToDo(
                "The loader gave no batches. A DataLoader with drop_last=True is empty if the data "
                "has fewer samples than a batch; an iterator is empty if it was used before."
            )

    def _some(self) -> Iterator[Any]:
        """The batches until there are enough images."""
        seen = 0
        for batch in self.batches:
            yield batch
            seen += images_in(batch)
            if self.images is not None and seen >= self.images:
                return

    def run(self, batch: Any, number: int) -> Any:
        """The model's output; an error of its own says which batch it was."""
        try:
            return self.forward(self.model, batch)
        except (torch.OutOfMemoryError, NotImplementedError):
            raise
        except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:
            said = str(error).strip() or type(error).__name__
            if isinstance(error, NormkitError) and not isinstance(error, ShapeError):
                raise
            raise ShapeError(
                f"The model fails on batch {number}, {describe(batch)}: {said}"
                f"{'' if said.endswith('.') else '.'} The model is unchanged. If the input is not "
                "the batch itself or its first part, try forward=lambda model, batch: ..."
            ) from error


def default_forward(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, tuple | list):
        if not batch:
            raise OptionError("A batch is an empty tuple, expected a tensor.")
        batch = batch[0]
    return run(model, batch)


def tensors_in(batch: Any) -> Iterator[Tensor]:
    """All tensors of a batch, in order."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        yield from chain.from_iterable(tensors_in(part) for part in batch.values())
    elif isinstance(batch, tuple | list):
        yield from chain.from_iterable(tensors_in(part) for part in batch)


def images_in(batch: Any) -> int:
    """How many samples a batch has: the length of its first tensor."""
    first = next(tensors_in(batch), None)
    return 1 if first is None or first.dim() == 0 else first.shape[0]


def move(batch: Any, device: torch.device | None) -> Any:
    """The batch on another device; its structure stays."""
    if device is None:
        return batch
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: move(part, device) for key, part in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(move(part, device) for part in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(move(part, device) for part in batch)
    return batch


def describe(batch: Any) -> str:
    shapes = [str(tuple(t.shape)) for t in tensors_in(batch)]
    return " ".join(shapes[:3]) if shapes else type(batch).__name__


def _device(model: nn.Module) -> torch.device | None:
    """The device of the model, if it has one."""
    devices = {t.device for t in chain(model.parameters(), model.buffers())}
    return devices.pop() if len(devices) == 1 else None
