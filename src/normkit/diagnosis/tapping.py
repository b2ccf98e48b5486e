"""Moments that a layer of normkit computes anyway, handed to whoever listens."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from normkit.core.layout import Batch, Channels
from normkit.core.moments import Moments
from normkit.layers.base import Normalizer

Listener = Callable[[Moments], None]


def tap(layer: Normalizer, listener: Listener) -> Callable[[], None]:
    """Let a function hear the moments of every batch; calling what is returned ends it.

    They are tables (N, C) of each sample, or (1, C) of the batch where the layer needs no more. A
    call of which nothing is heard computed none, or none of whole channels.
    """
    layer.listeners = (*layer.listeners, listener)

    def end() -> None:
        layer.listeners = tuple(heard for heard in layer.listeners if heard is not listener)

    return end


def is_of_channels(layer: Normalizer, x: Tensor) -> bool:
    """Whether the cells of a layer are whole channels, not pixels or pieces."""
    cells = layer.cells(x)
    return isinstance(cells, Batch | Channels) and cells.columns == x.shape[1]
