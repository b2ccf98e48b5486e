"""moments → coefficients → affine, and back again: every normalizer is this function.

Forward: one read of x for the moments, arithmetic on small tables, one read and one write for
the map y = a·x + b. Backward: one read of dy and x for the sums da = Σ dy·x and db = Σ dy; the
tables' own autograd graph turns them into dm and dv; one more read of both and one write for

    dx = a·dy + (dm − 2·m·dv)/L + (2·dv/L)·x.

Three passes forward and five backward, whatever the normalizer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from normkit.core.fusion import Fusion
from normkit.core.layout import Batch, Channels, Layout, dense
from normkit.core.moments import Coefficients, Moments
from normkit.engine import plain
from normkit.engine.compile import graph
from normkit.engine.dispatch import choose, expression_wanted, expression_wanted_of
from normkit.engine.epilogue import AffineMap, check

CoefficientFunction = Callable[[Moments | None], Coefficients]


def normalize(
    x: Tensor,
    coefficients: CoefficientFunction,
    *,
    cells: Callable[[Tensor], Layout] = Channels,
    use_moments: bool = True,
    residual: Tensor | None = None,
    activation: str = "none",
) -> Tensor:
    """activation(a·x + b + residual) with (a, b) = coefficients(moments of x).

    x is (N, C, *spatial), (N, C) included; y has its type and memory format.
    ``coefficients`` gets the moments of each cell (None if not ``use_moments``) and gives tables
    that broadcast to (N, K). Gradients reach x and whatever ``coefficients`` used.
    """
    check(x, residual, activation)
    x = dense(x)
    layout = cells(x)
    if expression_wanted():
        found = Moments(*graph.moments(x, layout), layout.count) if use_moments else None
        tables = _tables(coefficients(found), layout)
        return plain.affine(x, AffineMap(*tables, residual, activation), layout)
    link, found, through = None, None, x
    if use_moments:
        link = _Link()
        through, mean, var = _Moments.apply(x, layout, link)
        found = Moments(mean, var, layout.count)
    scale, shift = _tables(coefficients(found), layout)
    return _Affine.apply(through, x, scale, shift, residual, activation, layout, link)


def fused(
    x: Tensor,
    fusion: Fusion,
    *,
    cells: Callable[[Tensor], Layout],
    residual: Tensor | None = None,
    activation: str = "none",
) -> tuple[Tensor, Tensor, int, Tensor | None] | None:
    """The whole layer, if the chosen backend makes such coefficients in one kernel.

    None otherwise: then ``normalize`` does it. With it come a tensor and where in it the statistics
    of the batch begin, mean and second one after the other, which carry no gradient; and the gates
    if they are kept.
    """
    check(x, residual, activation)
    if expression_wanted():
        x = dense(x)
        return graph.fused(x, fusion, residual, activation, cells(x))
    x = dense(x)
    layout = cells(x)
    backend = choose(x, layout)
    if not (hasattr(backend, "moment_parts") and isinstance(layout, Batch | Channels)):
        return None
    from normkit.engine.families import fused as fast  # needs Triton, which is here

    return fast.fused(x, fusion, residual, activation, layout)


def moments(x: Tensor, cells: Callable[[Tensor], Layout] = Channels) -> Moments:
    """The moments of each cell of x, with their gradient."""
    x = dense(x)
    layout = cells(x)
    if expression_wanted():
        return Moments(*graph.moments(x, layout), layout.count)
    _, mean, var = _Moments.apply(x, layout, _Link())
    return Moments(mean, var, layout.count)


def _tables(found: Coefficients, layout: Layout) -> tuple[Tensor, Tensor]:
    """The coefficients as whole tables; autograd sums again what broadcasting repeated."""
    size = (layout.rows, layout.columns)
    return found.scale.expand(size), found.shift.expand(size)


class _Link:
    """Carries the map from the backward of _Affine to that of _Moments, which finishes dx."""

    def __init__(self) -> None:
        self.map: AffineMap | None = None


class _Moments(torch.autograd.Function):
    """(x, mean, var) of x. The returned x is for _Affine alone.

    _Affine.backward hands its incoming gradient through that x untouched, and the map through
    the link, so that dx is written once, here, where dm and dv are known too. In the backward of
    a backward only the moments may have a gradient; then there is no map.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: Layout, link: _Link) -> Any:
        mean, var = choose(x, layout).moments(x, layout)
        ctx.save_for_backward(x, mean)
        ctx.layout, ctx.link = layout, link
        ctx.set_materialize_grads(False)
        return x, mean, var

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        grad, grad_mean, grad_var = grads
        x, mean = ctx.saved_tensors
        layout, count = ctx.layout, ctx.layout.count
        slope = None if grad_var is None else 2 * grad_var / count
        constant = None if grad_mean is None else grad_mean / count
        if slope is not None:
            constant = -mean * slope if constant is None else constant - mean * slope
        if grad is None:
            return plain.moments_gradient(x, constant, slope, layout), None, None
        map, ctx.link.map = ctx.link.map, None
        passes = plain if expression_wanted_of(grad) else choose(x, layout)
        dx = passes.input_gradient(grad, x, map, constant, slope, layout)
        return dx, None, None


class _Affine(torch.autograd.Function):
    """activation(scale · x + shift + residual).

    ``through`` is x as _Moments returned it, the way back for the gradient; or x itself.
    """

    @staticmethod
    def forward(
        ctx: Any,
        through: Tensor,
        x: Tensor,
        scale: Tensor,
        shift: Tensor,
        residual: Tensor | None,
        act: str,
        layout: Layout,
        link: _Link | None,
    ) -> Any:
        recomputes = act != "none"
        keeps_x = recomputes or ctx.needs_input_grad[2]  # a fixed map needs only its scale
        ctx.save_for_backward(
            x if keeps_x else None, scale, shift, residual if recomputes else None
        )
        ctx.act, ctx.layout, ctx.link = act, layout, link
        return choose(x, layout).affine(x, AffineMap(scale, shift, residual, act), layout)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        x, scale, shift, residual = ctx.saved_tensors
        x = grad if x is None else x  # of the right shape; its values have no effect then
        needs_x, _, needs_scale, needs_shift, needs_residual = ctx.needs_input_grad[:5]
        layout, act = ctx.layout, ctx.act
        map = AffineMap(scale, shift, residual, act)
        passes = plain if expression_wanted_of(grad) else choose(x, layout)
        dx = da = db = dr = None
        if needs_scale or needs_shift or (needs_residual and act != "none"):
            da, db, dr = passes.sums(grad, x, map, layout, needs_residual)
        elif needs_residual:
            dr = grad
        if needs_x and ctx.link is not None:
            ctx.link.map = map
            dx = grad
        elif needs_x:
            dx = passes.input_gradient(grad, x, map, None, None, layout)
        return dx, None, da, db, dr, None, None, None
