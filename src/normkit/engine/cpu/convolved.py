"""The depthwise convolution after a norm, as a part of its step on a CPU: see ``depthwise.cpp``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from normkit.core.fusion import Depthwise
from normkit.engine.torch.operations import depthwise


def sizes(x: Tensor, layout: Any) -> tuple[float, ...]:
    """What its passes are told of maps, in place of ``extent``."""
    n, c, h, w = x.shape
    return n, c, h, w, layout.channels_last or h * w == 1, layout.rows


def fits(given: Depthwise, channels: int) -> bool:
    """Whether kernel and bias have the sizes that loops go through."""
    return given.kernel.numel() == 9 * channels and (given.bias is None or given.bias.numel() == channels)


def again(given: Sequence[Tensor], description: Any) -> Callable[..., Any] | None:
    """For a backward that someone looks into: what becomes of the map, by the parameters in the
    order ``given`` and its gates. None where there is no convolution."""
    if not isinstance(description, Depthwise):
        return None
    places = {id(p): i for i, p in enumerate(given)}
    kernel, bias = places[id(description.kernel)], places.get(id(description.bias))
    gated = getattr(description.norm, "keeps_gates", False)

    def convolved(z: Tensor, parameters: Sequence[Tensor], gates: Tensor | None) -> Tensor:
        shift = None if bias is None else parameters[bias]
        if not gated or shift is None:
            return depthwise(z, parameters[kernel], shift).to(z.dtype)
        y = depthwise(z, parameters[kernel], None)
        assert gates is not None
        return (y + (gates * shift)[:, :, None, None]).to(z.dtype)

    return convolved
