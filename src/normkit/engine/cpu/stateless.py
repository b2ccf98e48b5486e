"""Steps on a CPU of layers that keep no statistics and have one loop each way: positional
normalization (``pixel.cpp``) and dynamic tanh (``squash.cpp``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from normkit.core.fusion import Pixel, Squash
from normkit.engine import plain
from normkit.engine.cpu.families import NOTHING
from normkit.engine.cpu.passes import ACTIVATIONS, DTYPES, extent
from normkit.engine.cpu.steps import FIRST, RESIDUAL, THE_GRADIENT, Program, X

TABLES, AGAIN = 2, 3  # slots of the program that makes an output again: see Remake in replay.cpp


class _Step:
    """What such steps have in common, from the parameters and how many entries each must have."""

    def __init__(
        self,
        layer: Any,
        x: Tensor,
        residual: Tensor | None,
        activation: str,
        sizes: Sequence[tuple[Tensor | None, int]],
    ) -> None:
        self.activation, self.there = activation, [p is not None for p, _ in sizes]
        names = {id(p): name for name, p in layer._parameters.items()}
        given = [(p, size) for p, size in sizes if p is not None]
        own = {names.get(id(p)): p for p, _ in given}
        self.served = (
            activation in ACTIVATIONS
            and (residual is None or residual.dtype == x.dtype)
            and (None not in own and len(own) == len(given))  # tensors that C++ finds by name
            and all(p.numel() == size and p.dtype in DTYPES for p, size in given)
        )
        if not self.served:
            return
        place = {id(p): FIRST + i for i, (p, _) in enumerate(given)}
        self.parameters = [place.get(id(p), NOTHING) for p, _ in sizes]
        self.forward, tables = Program(FIRST + len(own)), FIRST + len(own)
        self.backward = backward = Program(tables + 2)
        needs_residual = residual is not None and residual.requires_grad
        before = backward.like_x() if needs_residual and activation != "none" else NOTHING
        dx = backward.like_x() if x.requires_grad else NOTHING
        found = [NOTHING if p is None else backward.table(size, p.dtype) for p, size in sizes]
        self.slots = [tables + 1, X, RESIDUAL, before, dx, tables, *found]  # of the backward
        self.known = {
            "parameters": list(own),
            "tensors": [p for p, _ in given],
            "training": layer.training,
            "activation": activation,
            "needs_x": x.requires_grad,
            "needs_residual": needs_residual,
            "residual": None if residual is None else residual.new_empty(0),
            "dx": dx,
            "dresidual": THE_GRADIENT if needs_residual and before == NOTHING else before,
            "gradients": [
                (slot, 0, size)
                for slot, (_, size) in zip(found, sizes, strict=True)
                if slot != NOTHING
            ],
            "buffers": [],
            "keeps_y": False,
            "report": None,  # no statistics that a batch could be left out of
            "gates": NOTHING,
            "rows": 0,
            "serves": 1,
            "writes": [],
        }

    def plan(self, y: int, tables: int, again: Callable[..., Any]) -> dict[str, Any]:
        """``again`` is the backward where someone looks into it."""
        forward, backward = self.forward.given(), self.backward.given()
        more = {"forward": forward, "backward": backward, "y": y, "tables": tables, "again": again}
        return {**self.known, **more}


def written_pixels(
    layer: Any, x: Tensor, residual: Tensor | None, activation: str, pixel: Pixel, layout: Any
) -> dict[str, Any] | None:
    """The plan of a step of positional normalization; None if no loops do it."""
    samples, channels, positions = x.shape[0], x.shape[1], layout.positions
    sizes = [(pixel.weight, channels), (pixel.bias, channels)]
    step = _Step(layer, x, residual, activation, sizes)
    if not step.served:
        return None
    last, relu = layout.channels_last or positions == 1, ACTIVATIONS[activation]
    numbers = [samples, channels, positions, last, relu, pixel.correction, pixel.eps]
    forward = step.forward
    y, table = forward.like_x(), forward.table(2 * channels + 2 * samples * positions)
    forward.call("pixel_affine", [*step.parameters, table], [channels])
    forward.call("pixel_map", [X, RESIDUAL, y, table], numbers)
    step.backward.call("pixel_gradient", step.slots, numbers)
    again = plain.pixels_again(pixel.eps, pixel.correction, activation, step.there)
    return step.plan(y, table, again)


def written_squash(
    layer: Any, x: Tensor, residual: Tensor | None, activation: str, squash: Squash, layout: Any
) -> dict[str, Any] | None:
    """The plan of a step of dynamic tanh; None if no loops do it."""
    channels = x.shape[1]
    sizes = [(squash.weight, channels), (squash.bias, channels), (squash.alpha, 1)]
    step = _Step(layer, x, residual, activation, sizes)
    if not step.served:
        return None
    numbers = [*extent(layout), ACTIVATIONS[activation]]
    forward = step.forward
    y, tables = forward.like_x(), forward.table(2 * channels + 1)
    forward.call("squash_map", [X, RESIDUAL, y, *step.parameters, tables], numbers)
    remake = Program(AGAIN + 1)
    kept = [(TABLES, 0), (TABLES, channels), (TABLES, 2 * channels)]
    remake.call("squash_map", [X, RESIDUAL, AGAIN, *kept, NOTHING], numbers)
    step.backward.call("squash_gradient", step.slots, numbers)
    plan = step.plan(y, tables, plain.squashed_again(activation, step.there))
    return {**plan, "remake": remake.given()}
