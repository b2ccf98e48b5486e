"""The backward of a step on a CPU where someone looks into it: differentiates it once more, or has
many gradients at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from normkit.core.fusion import Fusion
from normkit.core.moments import Moments
from normkit.core.precision import statistics_dtype
from normkit.core.statistics import LayerState, Repetition
from normkit.engine import plain
from normkit.engine.coefficients import as_it_was
from normkit.engine.cpu import convolved
from normkit.engine.cpu.families import FamilyLoops
from normkit.engine.epilogue import AffineMap


def looked_into(
    layer: Any,
    names: list[str],
    fusion: Fusion,
    family: FamilyLoops,
    act: str,
    layout: Any,
    after: Sequence[Tensor | None],
) -> Callable[..., Any]:
    """The layer computes its map again, on tables, and autograd differentiates."""
    then, training, size = as_it_was(layer), layer.training, (layout.rows, layout.columns)
    given = [layer._parameters[name] for name in names]
    order = [i for q in fusion.parameters for i, p in enumerate(given) if p is q]
    many, seen, gated = family.tables, family.seen, getattr(fusion, "keeps_gates", False)
    convolve = convolved.Again(given, after, gated, act) if after else None
    follows = act if convolve is None else "none"
    del given, fusion, family, after

    def again(
        x: Tensor,
        residual: Tensor | None,
        parameters: Sequence[Tensor],
        tables: Tensor,
        grad: Tensor,
        needs: Sequence[bool],
        grad_gates: Tensor | None = None,
    ) -> list[Tensor | None]:
        further = torch.is_grad_enabled()
        with torch.enable_grad():
            if convolve is not None:  # in place of the residual it has its result
                grad, residual = convolve.before(grad, residual), None
            inputs = plain.aliases([x, residual, *parameters])
            x, residual, *parameters = inputs  # type: ignore[assignment]
            moments = Moments(*plain.moments(x, layout), layout.count)
            state = LayerState(training, dict(then._buffers), True)
            repeated = Repetition(then, state, dict(zip(names, parameters, strict=True)))
            used = [parameters[i] for i in order]
            result = repeated.result(
                moments, used, used, seen(tables[:many].to(moments.mean.dtype))
            )
            scale, shift, center = result.map.each(lambda t: t.expand(size))
            y = plain.affine(x, AffineMap(scale, shift, center, residual, follows), layout)
            if convolve is not None:
                y = convolve.after(y, parameters, result.gate)
            outputs, outer = [y], [grad]
            if result.gate is not None and grad_gates is not None:
                outputs, outer = [y, result.gate.expand(size)], [grad, grad_gates]
            back = plain.gradients_of(outputs, inputs, needs, outer, further)
        if needs[1] and residual is None:  # it was not kept, for nothing follows the sum
            back[1] = grad
        return back

    return again


def looked_into_frozen(act: str, layout: Any) -> Callable[..., Any]:
    """The same of a map that is given, where nothing is learned: it is all in the tables."""

    def again(
        x: Tensor | None,
        residual: Tensor | None,
        parameters: Sequence[Tensor],
        tables: Tensor,
        grad: Tensor,
        needs: Sequence[bool],
    ) -> list[Tensor | None]:
        further = torch.is_grad_enabled()
        with torch.enable_grad():
            if x is None:  # its values have no effect
                x = tables.new_zeros(layout.shape, dtype=grad.dtype, requires_grad=True)
            inputs = plain.aliases([x, residual])
            own, rest = inputs
            assert own is not None
            wide = tables.to(statistics_dtype(own.dtype)).view(4, 1, -1)
            scale, shift, center = wide[:3].expand(3, layout.rows, -1)
            y = plain.affine(own, AffineMap(scale, shift, center, rest, act), layout)
            back = plain.gradients_of([y], inputs, needs[:2], [grad], further)
        if needs[1] and residual is None:  # it was not kept, for nothing follows the sum
            back[1] = grad
        return [*back, *(None for _ in parameters)]

    return again
