"""A whole layer with its coefficients in one kernel each way: the autograd function.

Three launches forward (moments, coefficients, map), three backward (sums, coefficients, dx). What
is peculiar to a family of layers stands in its family file: fused_pool, fused_gate, fused_channel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from normkit.core.fusion import Channel, Fusion, Gate, Pool
from normkit.core.moments import Moments
from normkit.engine import fused_channel, fused_gate, fused_pool, plain
from normkit.engine import triton_backend as passes
from normkit.engine.epilogue import AffineMap
from normkit.engine.family import ChannelLayout, Family, Mapped

FAMILIES: dict[type, Family] = {Pool: fused_pool, Gate: fused_gate, Channel: fused_channel}


def fused(
    x: Tensor, fusion: Fusion, residual: Tensor | None, act: str, layout: ChannelLayout
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The layer's output, its statistics (no gradient), and its gates if they are kept."""
    family = FAMILIES[type(fusion)]
    return _Fused.apply(x, residual, fusion, act, layout, family, *family.parameters(fusion))


class _Fused(torch.autograd.Function):
    """The same numbers as the generic path gives; here without tables in between."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        fusion: Fusion,
        act: str,
        layout: ChannelLayout,
        family: Family,
        *parameters: Tensor | None,
    ) -> Any:
        parts = passes.moment_parts(x, layout)
        found = family.mapped(x, parts, fusion, layout)
        y = passes.apply_map(x, found.map, residual, act, layout)
        ctx.save_for_backward(
            x,
            residual if act != "none" else None,
            found.map,
            found.statistics,
            found.gates,
            *found.kept,
            *parameters,
        )
        ctx.fusion, ctx.act, ctx.layout, ctx.family = fusion, act, layout, family
        ctx.mark_non_differentiable(found.statistics)
        ctx.set_materialize_grads(False)
        return y, found.statistics, found.gates

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad, _, grad_gates = grads
        x, residual, *saved = ctx.saved_tensors
        count = len(ctx.needs_input_grad) - 6
        parameters = tuple(saved[len(saved) - count :])
        found = Mapped(saved[0], saved[1], saved[2], tuple(saved[3 : len(saved) - count]))
        fusion, act, layout, family = ctx.fusion, ctx.act, ctx.layout, ctx.family
        if grad is None:
            grad = torch.zeros_like(x)
        if torch.is_grad_enabled():
            given = [x, residual, *parameters]
            return _again(ctx, grad, grad_gates, found, given)
        needs = ctx.needs_input_grad
        parts, dr = passes.sum_parts(grad, x, found.map, residual, act, layout, needs[1])
        extra, dparameters = family.gradients(x, parts, fusion, layout, found, grad_gates)
        dx = None
        if needs[0]:
            dx = passes.apply_gradient(grad, x, found.map, residual, act, extra, layout)
        wanted = [
            d.to(p.dtype) if need and d is not None and p is not None else None
            for d, p, need in zip(dparameters, parameters, needs[6:], strict=True)
        ]
        return dx, dr, None, None, None, None, *wanted


def _again(
    ctx: Any, grad: Tensor, grad_gates: Tensor | None, found: Mapped, given: list[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """The backward of a backward: through the plain expression, which autograd differentiates."""
    x, residual, *parameters = given
    assert x is not None
    layout = ctx.layout
    moments = Moments(*plain.moments(x, layout), layout.count)
    map, gates = ctx.family.expression(ctx.fusion, moments, tuple(parameters), found)
    size = (layout.rows, layout.columns)
    scale, shift = (t.expand(size) for t in map)
    y = plain.affine(x, AffineMap(scale, shift, residual, ctx.act), layout)
    needs = [ctx.needs_input_grad[0], ctx.needs_input_grad[1], *ctx.needs_input_grad[6:]]
    inputs = [t for t, need in zip(given, needs, strict=True) if need and t is not None]
    outputs, outer = [y], [grad]
    if gates is not None and grad_gates is not None:
        outputs, outer = [y, gates.expand_as(grad_gates)], [grad, grad_gates]
    flowing = iter(
        torch.autograd.grad(outputs, inputs, outer, create_graph=True, allow_unused=True)
    )
    back = [
        next(flowing) if need and t is not None else None
        for t, need in zip(given, needs, strict=True)
    ]
    if needs[1] and residual is None:  # it was not kept, for nothing follows the sum
        back[1] = grad
    return back[0], back[1], None, None, None, None, *back[2:]
