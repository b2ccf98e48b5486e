"""A step of dynamic tanh on a CPU: one loop each way (``squash.cpp``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from normkit.core.fusion import Squash
from normkit.engine import plain
from normkit.engine.cpu.families import NOTHING
from normkit.engine.cpu.passes import ACTIVATIONS, DTYPES, extent
from normkit.engine.cpu.steps import FIRST, RESIDUAL, THE_GRADIENT, Program, X

TABLES, AGAIN = 2, 3  # slots of the program that makes an output again: see Remake in replay.cpp


def written_squash(
    layer: Any, x: Tensor, residual: Tensor | None, activation: str, squash: Squash, layout: Any
) -> dict[str, Any] | None:
    """The plan of a step like this one; None if no loops do it, or not with the layer's own
    tensors alone: as ``steps.written``."""
    if activation not in ACTIVATIONS or (residual is not None and residual.dtype != x.dtype):
        return None
    channels = x.shape[1]
    names = {id(p): name for name, p in layer._parameters.items()}
    sizes = [(squash.weight, channels), (squash.bias, channels), (squash.alpha, 1)]
    given = [p for p, _ in sizes if p is not None]
    own = {names.get(id(p)): p for p in given}
    if None in own or len(own) < len(given):
        return None
    if not all(p is None or (p.numel() == size and p.dtype in DTYPES) for p, size in sizes):
        return None
    numbers = [*extent(layout), ACTIVATIONS[activation]]
    place = {id(p): FIRST + i for i, p in enumerate(given)}
    parameters = [place.get(id(p), NOTHING) for p, _ in sizes]

    forward = Program(FIRST + len(own))
    y, tables = forward.like_x(), forward.table(2 * channels + 1)
    forward.call("squash_map", [X, RESIDUAL, y, *parameters, tables], numbers)
    remake = Program(AGAIN + 1)
    kept = [(TABLES, 0), (TABLES, channels), (TABLES, 2 * channels)]
    remake.call("squash_map", [X, RESIDUAL, AGAIN, *kept, NOTHING], numbers)

    tables_again, grad = FIRST + len(own), FIRST + len(own) + 1
    backward = Program(grad + 1)
    needs_residual = residual is not None and residual.requires_grad
    before = backward.like_x() if needs_residual and activation != "none" else NOTHING
    dx = backward.like_x() if x.requires_grad else NOTHING
    found = [NOTHING if p is None else backward.table(size, p.dtype) for p, size in sizes]
    parts = zip(found, (size for _, size in sizes), strict=True)
    backward.call("squash_gradient", [grad, X, RESIDUAL, before, dx, tables_again, *found], numbers)
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
        "remake": remake.given(),
        "backward": backward.given(),
        "y": y,
        "tables": tables,
        "keeps_y": False,
        "dx": dx,
        "dresidual": THE_GRADIENT if needs_residual and before == NOTHING else before,
        "gradients": [(slot, 0, size) for slot, size in parts if slot != NOTHING],
        "again": _looked_into(activation, [p is not None for p, _ in sizes]),
        "report": None,  # no statistics that a batch could be left out of
        "gates": NOTHING,
        "rows": 0,
        "serves": 1,
        "writes": [],
    }


def _looked_into(act: str, there: Sequence[bool]) -> Callable[..., Any]:
    """The backward of a step where someone looks into it: through the plain expression."""

    def again(
        x: Tensor,
        residual: Tensor | None,
        parameters: Sequence[Tensor],
        tables: Tensor,
        grad: Tensor,
        needs: Sequence[bool],
    ) -> list[Tensor | None]:
        def outputs(x: Tensor, residual: Tensor | None, *own: Tensor) -> list[Tensor]:
            saved = iter(own)
            weight, bias, alpha = (next(saved) if is_there else None for is_there in there)
            assert alpha is not None
            return [plain.squashed(x, alpha, weight, bias, residual, act)]

        return plain.gradients_again(outputs, [x, residual, *parameters], needs, grad)

    return again
