"""A depthwise convolution after a norm, as a part of its step on a CPU: see ``depthwise.cpp``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from normkit.core.fusion import Depthwise, Fusion
from normkit.engine.epilogue import before
from normkit.engine.torch.operations import depthwise

After = Sequence[Tensor | None]  # kernel and bias, or nothing


def apart(description: Any) -> tuple[Fusion, After]:
    """A norm, and what comes after it."""
    return (
        (description[0], description[1:])
        if isinstance(description, Depthwise)
        else (description, ())
    )


def fits(after: After, channels: int) -> bool:
    """Whether tensors have the sizes that loops go through."""
    sizes = zip(after, (9 * channels, channels), strict=False)
    return all(t is None or t.numel() == size for t, size in sizes)


def passes(x: Tensor, layout: Any) -> tuple[str, tuple[float, ...]]:
    """How the passes over activations are called, and what they are told of maps."""
    n, c, h, w = x.shape
    return "depthwise_", (n, c, h, w, layout.channels_last or h * w == 1, layout.rows)


class Again:
    """The same for a backward that someone looks into, which has the result of an activation."""

    def __init__(self, given: Sequence[Tensor], after: After, gated: bool, act: str) -> None:
        places = {id(p): i for i, p in enumerate(given)}
        self.places = [None if p is None else places[id(p)] for p in after]
        self.gated, self.act = gated, act

    def before(self, grad: Tensor, y: Tensor | None) -> Tensor:
        """The gradient before the activation, if there is one."""
        return grad if y is None else before(grad, y.detach(), self.act)

    def after(self, z: Tensor, parameters: Sequence[Tensor], gates: Tensor | None = None) -> Tensor:
        """What becomes of the map."""
        kernel, bias = (None if i is None else parameters[i] for i in self.places)
        assert kernel is not None
        if not self.gated or gates is None or bias is None:
            return depthwise(z, kernel, bias).to(z.dtype)
        y = depthwise(z, kernel, None)
        return y + (gates * bias).to(y.dtype)[:, :, None, None]
