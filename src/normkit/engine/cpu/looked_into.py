"""The backward of a step on a CPU where someone looks into it: differentiates it once more, or has
many gradients at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from normkit.core.fusion import Fusion
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
    then, training = as_it_was(layer), layer.training
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
        if convolve is not None:  # in place of the residual it has its result
            grad, residual = convolve.before(grad, residual), None

        def outputs(x: Tensor, residual: Tensor | None, *own: Tensor) -> list[Tensor]:
            state = LayerState(training, dict(then._buffers), True)
            repeated = Repetition(then, state, dict(zip(names, own, strict=True)))
            used = [own[i] for i in order]
            wide = tables[:many].to(statistics_dtype(x.dtype))
            result = partial(repeated.result, given=used, saved=used, seen=seen(wide))
            y, *gates = plain.repeated(x, residual, follows, layout, result)
            return [y if convolve is None else convolve.after(y, own, *gates), *gates]

        return plain.gradients_again(outputs, [x, residual, *parameters], needs, grad, grad_gates)

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
        if x is None:  # its values have no effect
            x = tables.new_zeros(layout.shape, dtype=grad.dtype, requires_grad=True)

        def outputs(x: Tensor, residual: Tensor | None) -> list[Tensor]:
            wide = tables.to(statistics_dtype(x.dtype)).view(4, 1, -1)
            scale, shift, center = wide[:3].expand(3, layout.rows, -1)
            return [plain.affine(x, AffineMap(scale, shift, center, residual, act), layout)]

        back = plain.gradients_again(outputs, [x, residual], needs[:2], grad)
        return [*back, *(None for _ in parameters)]

    return again
