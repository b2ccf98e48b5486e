"""A step of positional normalization on a CPU: one loop each way (``pixel.cpp``)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from normkit.core.fusion import Pixel
from normkit.engine import plain
from normkit.engine.cpu.families import NOTHING
from normkit.engine.cpu.passes import ACTIVATIONS, DTYPES
from normkit.engine.cpu.steps import FIRST, RESIDUAL, THE_GRADIENT, Program, X


def written_pixels(
    layer: Any, x: Tensor, residual: Tensor | None, activation: str, pixel: Pixel, layout: Any
) -> dict[str, Any] | None:
    """The plan of a step like this one; None if no loops do it, or not with the layer's own
    tensors alone: as ``steps.written``."""
    if activation not in ACTIVATIONS or (residual is not None and residual.dtype != x.dtype):
        return None
    names = {id(p): name for name, p in layer._parameters.items()}
    given = [p for p in (pixel.weight, pixel.bias) if p is not None]
    own = {names.get(id(p)): p for p in given}
    if None in own or len(own) < len(given):
        return None
    samples, channels, positions = x.shape[0], x.shape[1], layout.positions
    if not all(p.numel() == channels and p.dtype in DTYPES for p in given):
        return None
    last, relu = layout.channels_last or positions == 1, ACTIVATIONS[activation]
    numbers = [samples, channels, positions, last, relu, pixel.correction, pixel.eps]
    place = {id(p): FIRST + i for i, p in enumerate(given)}
    weight, bias = (place.get(id(p), NOTHING) for p in (pixel.weight, pixel.bias))

    forward = Program(FIRST + len(own))
    y, table = forward.like_x(), forward.table(2 * channels + 2 * samples * positions)
    forward.call("pixel_affine", [weight, bias, table], [channels])
    forward.call("pixel_map", [X, RESIDUAL, y, table], numbers)

    table_again, grad = FIRST + len(own), FIRST + len(own) + 1
    backward = Program(grad + 1)
    needs_residual = residual is not None and residual.requires_grad
    before = backward.like_x() if needs_residual and activation != "none" else NOTHING
    dx = backward.like_x() if x.requires_grad else NOTHING
    found = [
        NOTHING if p is None else backward.table(channels, p.dtype)
        for p in (pixel.weight, pixel.bias)
    ]
    slots = [grad, X, RESIDUAL, before, dx, table_again, *found]
    backward.call("pixel_gradient", slots, numbers)
    there = pixel.weight is not None, pixel.bias is not None
    return {
        "parameters": list(own),
        "buffers": [],
        "tensors": given,
        "training": layer.training,
        "activation": activation,
        "needs_x": x.requires_grad,
        "needs_residual": needs_residual,
        "residual": None if residual is None else residual.new_empty(0),
        "forward": forward.given(),
        "backward": backward.given(),
        "y": y,
        "tables": table,
        "keeps_y": False,
        "dx": dx,
        "dresidual": THE_GRADIENT if needs_residual and before == NOTHING else before,
        "gradients": [(slot, 0, channels) for slot in found if slot != NOTHING],
        "again": plain.pixels_again(pixel.eps, pixel.correction, activation, there),
        "report": None,  # no statistics that a batch could be left out of
        "gates": NOTHING,
        "rows": 0,
        "serves": 1,
        "writes": [],
    }
