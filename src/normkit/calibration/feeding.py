"""Batches for a model, up to so many images."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from normkit.errors import OptionError
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
from normkit.inspection.calling import Forward, images_in

HINT = (
    "The model is unchanged. If the input is not the batch itself or its first part, try "
    "forward=lambda model, batch: ..."
)


class Feed:
    """Batches for a model: each is moved to its device and given to it, see ``inputs_of``.

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
        refuse_no_batches(batches)
        if images is not None and (isinstance(images, bool) or images < 1):
            raise OptionError(f"Expected images to be a positive number, got {images!r}.")
        self.model, self.batches, self.images = model, batches, images
        self.forward = forward or _forward
        self.device = device_of(model)

    def kept(self) -> None:
        """Make sure that the batches can be gone through again: an iterator is read into a list."""
        if iter(self.batches) is self.batches:
            self.batches = list(self._enough())

    def __iter__(self) -> Iterator[Any]:
        for batch in some_of(self._enough()):
            yield moved(batch, self.device)

    def _enough(self) -> Iterator[Any]:
        """The batches until there are enough images."""
        seen = 0
        for batch in self.batches:
            yield batch
            seen += self.size(batch)
            if self.images is not None and seen >= self.images:
                return

    def images_of(self, batch: Any) -> Sequence[Tensor] | None:
        """The images of a batch that is a list of them, for models that take lists."""
        return images_in(self.model, inputs_of(batch, self.model))

    def size(self, batch: Any) -> int:
        """How many samples a batch has."""
        images = self.images_of(batch)
        return samples_in(batch) if images is None else len(images)

    def run(self, batch: Any, number: int) -> Any:
        """The model's output; an error of its own says which batch it was."""
        with naming(batch, number, HINT):
            return self.forward(self.model, batch)


def _forward(model: nn.Module, batch: Any) -> Any:
    return run(model, inputs_of(batch, model))
