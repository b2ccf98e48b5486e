"""Moments that a layer of normkit computes anyway, handed to whoever listens.

A layer is not changed for this: while someone listens, the methods that get the moments are
replaced on the instance by ones that pass them on. Nobody listening costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from normkit.core.fusion import Channel, Pool
from normkit.core.layout import Batch, Channels
from normkit.core.moments import Moments
from normkit.layers.base import Normalizer

Listener = Callable[[Moments], None]

_listeners: WeakKeyDictionary[Normalizer, list[Listener]] = WeakKeyDictionary()


def tap(layer: Normalizer, listener: Listener) -> Callable[[], None]:
    """Let a function hear the moments of every batch; calling what is returned ends it.

    They are tables (N, C) of each sample, or (1, C) of the batch where the layer needs no more. A
    call of which nothing is heard computed none, or none of whole channels.
    """
    heard = _listeners.get(layer)
    if heard is None:
        heard = _listeners[layer] = []
        _replace(layer, heard)
    heard.append(listener)

    def end() -> None:
        if listener in heard:
            heard.remove(listener)
        if not heard and _listeners.get(layer) is heard:
            del _listeners[layer]
            for name in _methods(layer):
                vars(layer).pop(name, None)

    return end


def _methods(layer: Normalizer) -> tuple[str, ...]:
    """What is called with the moments, in turn: plainly, and after a kernel has used them."""
    return ("gated" if hasattr(layer, "gated") else "coefficients"), "after_fusion"


def _replace(layer: Normalizer, heard: list[Listener]) -> None:
    plain, fused = _methods(layer)
    first, second = getattr(layer, plain), getattr(layer, fused)

    def with_moments(moments: Moments | None, *rest: Any) -> Any:
        if moments is not None:
            found = Moments(moments.mean.detach(), moments.var.detach(), moments.count)
            for listener in list(heard):
                listener(found)
        return first(moments, *rest)

    def after_fusion(fusion: Any, tables: Tensor, begin: int, x: Tensor) -> None:
        found = _of_batch(layer, fusion, tables, begin, x)
        if found is not None:
            for listener in list(heard):
                listener(found)
        second(fusion, tables, begin, x)

    vars(layer)[plain] = with_moments
    vars(layer)[fused] = after_fusion


def _of_batch(
    layer: Normalizer, fusion: Any, tables: Tensor, begin: int, x: Tensor
) -> Moments | None:
    """Statistics (1, C) of the batch, where a kernel leaves them: a mean and a variance."""
    size = layer.channels
    pool = isinstance(fusion, Pool) and fusion.kind == "batch" and fusion.groups == size
    channel = isinstance(fusion, Channel) and fusion.given is None and fusion.rate is None
    if not (channel or (pool and fusion.ramps is None)):
        return None
    mean, var = tables[begin : begin + 2 * size].detach().view(2, 1, size)
    return Moments(mean.clone(), var.clone(), x.numel() // size)


def is_of_channels(layer: Normalizer, x: Tensor) -> bool:
    """Whether the cells of a layer are whole channels, not pixels or pieces."""
    cells = layer.cells(x)
    return isinstance(cells, Batch | Channels) and cells.columns == x.shape[1]
