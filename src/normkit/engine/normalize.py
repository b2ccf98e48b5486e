"""moments → coefficients → affine, and back again: every normalizer is this function.

Forward: one read of x for the moments, arithmetic on small tables, one read and one write for
the map y = a·(x − c) + b. Backward: one read of dy and x for the sums da = Σ dy·(x − c) and
db = Σ dy; the tables' own autograd graph turns them into dm and dv; one more read of both and one
write for

    dx = a·dy + dm/L + (2·dv/L)·(x − m).

Three passes forward and five backward, whatever the normalizer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from normkit.core.fusion import Fixed, Fusion, Squash
from normkit.core.layout import Batch, Channels, Layout, dense
from normkit.core.moments import Coefficients, Moments
from normkit.core.statistics import Repetition
from normkit.engine import plain, remaking
from normkit.engine.compile import graph
from normkit.engine.dispatch import OPERATORS, Path, decide, looked_into_backward
from normkit.engine.epilogue import AffineMap, check

LOOKED_INTO = ("expression", "moments", *OPERATORS)  # paths of which plain arithmetic is left

CoefficientFunction = Callable[[Moments | None], Coefficients]


def normalize(
    x: Tensor,
    coefficients: CoefficientFunction,
    *,
    cells: Callable[[Tensor], Layout] = Channels,
    use_moments: bool = True,
    residual: Tensor | None = None,
    activation: str = "none",
    path: Path | None = None,
) -> Tensor:
    """activation(a·(x − c) + b + residual) with (a, b, c) = coefficients(moments of x).

    x is (N, C, *spatial), (N, C) included; y has its type and memory format.
    ``coefficients`` gets the moments of each cell (None if not ``use_moments``) and gives tables
    that broadcast to (N, K). Gradients reach x and whatever ``coefficients`` used. ``path`` is what
    has been decided for a layer; without one it is decided here.
    """
    check(x, residual, activation)
    x = dense(x)
    layout = cells(x)
    if path is None:
        path = decide(x, layout)
    if path.name in LOOKED_INTO:
        table = Moments(*_moments(path, x, layout), layout.count) if use_moments else None
        tables = _tables(coefficients(table), layout, path)
        return plain.affine(x, AffineMap(*tables, residual, activation), layout)
    passes, link, table, through = path.passes, None, None, x
    if use_moments:
        link = _Link()
        through, mean, var = _Moments.apply(x, layout, link, passes)
        table = Moments(mean, var, layout.count)
    tables = _tables(coefficients(table), layout, path)
    return _Affine.apply(through, x, *tables, residual, activation, layout, link, passes)


def fused(
    path: Path,
    x: Tensor,
    fusion: Fusion,
    repetition: Repetition,
    *,
    cells: Callable[[Tensor], Layout],
    residual: Tensor | None = None,
    activation: str = "none",
    record: Any = None,
) -> tuple[Tensor, Tensor, int, Tensor | None]:
    """The whole layer, on a path that makes such coefficients in a kernel.

    With it come a tensor and where in it the statistics of the batch begin, mean and second one
    after the other, which carry no gradient; and the gates if they are kept. A ``record`` is told
    what is launched, for the next step to be replayed.
    """
    check(x, residual, activation)
    layout = cells(x)
    if path.name in OPERATORS:
        return graph.fused(path, x, fusion, residual, activation, layout)
    # families need Triton, which is here
    assert isinstance(layout, Batch | Channels)
    if isinstance(fusion, Fixed | Squash):  # nothing is made of the batch
        from normkit.engine.families import pointwise

        y = pointwise.pointwise(x, fusion, residual, activation, layout, record)
        return y, y, 0, None
    from normkit.engine.families import fused as families

    return families.fused(x, fusion, residual, activation, layout, repetition, record)


def moments(x: Tensor, cells: Callable[[Tensor], Layout] = Channels) -> Moments:
    """The moments of each cell of x, with their gradient."""
    x = dense(x)
    layout = cells(x)
    path = decide(x, layout)
    if path.name in LOOKED_INTO:
        return Moments(*_moments(path, x, layout), layout.count)
    _, mean, var = _Moments.apply(x, layout, _Link(), path.passes)
    return Moments(mean, var, layout.count)


def _moments(path: Path, x: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    return plain.moments(x, layout) if path.name == "expression" else graph.moments(x, layout)


def _tables(map: Coefficients, layout: Layout, path: Path) -> Coefficients:
    """The coefficients as whole tables; autograd sums again what broadcasting repeated."""
    size = (layout.rows, layout.columns)
    if path.name in LOOKED_INTO:  # a graph for any batch must not ask how many samples there are
        return map.each(lambda table: table.expand(size))
    return map.each(lambda table: table if table.shape == size else table.expand(size))


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
    def forward(ctx: Any, x: Tensor, layout: Layout, link: _Link, passes: Any) -> Any:
        mean, var = passes.moments(x, layout)
        ctx.save_for_backward(x, mean)
        ctx.layout, ctx.link, ctx.passes = layout, link, passes
        ctx.set_materialize_grads(False)
        return x, mean, var

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        grad, grad_mean, grad_var = grads
        x, mean = ctx.saved_tensors
        layout, count = ctx.layout, ctx.layout.count
        if isinstance(count, Tensor):
            count = count.clamp(min=1)  # a mask may leave nothing of a sample
        slope = None if grad_var is None else 2 * grad_var / count
        constant = None if grad_mean is None else grad_mean / count
        if grad is None:
            return plain.moments_gradient(x, constant, slope, mean, layout), None, None, None
        map, ctx.link.map = ctx.link.map, None
        if slope is not None:  # of x − mean, but the pass has x − center
            apart = mean if map.center is None else mean - map.center
            constant = -apart * slope if constant is None else constant - apart * slope
        passes = plain if looked_into_backward(grad) else ctx.passes
        dx = passes.input_gradient(grad, x, map, constant, slope, layout)
        return dx, None, None, None


class _Affine(torch.autograd.Function):
    """activation(scale · (x − center) + shift + residual).

    ``through`` is x as _Moments returned it, the way back for the gradient; or x itself.
    """

    @staticmethod
    def forward(
        ctx: Any,
        through: Tensor,
        x: Tensor,
        scale: Tensor,
        shift: Tensor | None,
        center: Tensor | None,
        residual: Tensor | None,
        act: str,
        layout: Layout,
        link: _Link | None,
        passes: Any,
    ) -> Any:
        recomputes = act != "none"
        keeps_x = recomputes or ctx.needs_input_grad[2]  # a fixed map needs only its scale
        ctx.save_for_backward(
            x if keeps_x else None,
            scale,
            shift if recomputes else None,
            center if keeps_x else None,
            residual if recomputes else None,
        )
        ctx.act, ctx.layout, ctx.link, ctx.passes = act, layout, link, passes
        y = passes.affine(x, AffineMap(scale, shift, center, residual, act), layout)

        def make(x: Tensor, residual: Tensor | None) -> Tensor:
            made: Tensor = passes.affine(x, AffineMap(scale, shift, center, residual, act), layout)
            return made

        remaking.offer(y, x, residual, make)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        x, scale, shift, center, residual = ctx.saved_tensors
        x = grad if x is None else x  # of the right shape; its values have no effect then
        needs_x, _, *needs_tables, needs_residual = ctx.needs_input_grad[:6]
        layout, act = ctx.layout, ctx.act
        map = AffineMap(scale, shift, center, residual, act)
        passes = plain if looked_into_backward(grad) else ctx.passes
        dx = da = db = dc = dr = None
        if any(needs_tables) or (needs_residual and act != "none"):
            da, db, dr = passes.sums(grad, x, map, layout, needs_residual)
            if needs_tables[2]:
                dc = -scale * db
        elif needs_residual:
            dr = grad
        if needs_x and ctx.link is not None:
            ctx.link.map = map
            dx = grad
        elif needs_x:
            dx = passes.input_gradient(grad, x, map, None, None, layout)
        return dx, None, da, db if needs_tables[1] else None, dc, dr, None, None, None, None
