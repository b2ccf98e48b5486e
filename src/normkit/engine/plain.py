"""The four passes as differentiable torch expressions: the specification of the backends.

Used where an expression is better than a call: under torch.compile, which fuses it; under
torch.func transforms; and in the backward of a backward.
"""

from __future__ import annotations

import torch
from torch import Tensor

from normkit.core.layout import Layout
from normkit.core.precision import statistics_dtype
from normkit.engine.epilogue import before, epilogue


def moments(x: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    cells = layout.view(x).to(statistics_dtype(x.dtype))
    mean = layout.mean(cells)
    var = layout.mean((cells - layout.over(mean)).square())
    return layout.lift(mean), layout.lift(var)


def affine(
    x: Tensor, scale: Tensor, shift: Tensor, residual: Tensor | None, act: str, layout: Layout
) -> Tensor:
    y = epilogue(_mapped(x, scale, shift, layout), _cells(residual, layout), act)
    return layout.unview(y.to(x.dtype))


def sums(
    grad: Tensor,
    x: Tensor,
    scale: Tensor,
    shift: Tensor,
    residual: Tensor | None,
    act: str,
    layout: Layout,
    grad_residual: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    g = _before(grad, x, scale, shift, residual, act, layout)
    da, db = layout.sum(g * layout.view(x)), layout.sum(g)
    kept = layout.unview(g.to(x.dtype)) if grad_residual else None
    return layout.lift(da), layout.lift(db), kept


def input_gradient(
    grad: Tensor,
    x: Tensor,
    scale: Tensor,
    shift: Tensor,
    residual: Tensor | None,
    act: str,
    constant: Tensor | None,
    slope: Tensor | None,
    layout: Layout,
) -> Tensor:
    g = _before(grad, x, scale, shift, residual, act, layout)
    dx = layout.unview((g * layout.over(layout.lay(scale))).to(x.dtype))
    return dx + moments_gradient(x, constant, slope, layout)


def moments_gradient(
    x: Tensor, constant: Tensor | None, slope: Tensor | None, layout: Layout
) -> Tensor:
    """constant + slope · x: what the moments' gradients add to the input's."""
    dx = torch.zeros_like(layout.view(x))
    if slope is not None:
        dx = dx + layout.over(layout.lay(slope)) * layout.view(x)
    if constant is not None:
        dx = dx + layout.over(layout.lay(constant))
    return layout.unview(dx.to(x.dtype))


def _cells(x: Tensor | None, layout: Layout) -> Tensor | None:
    return None if x is None else layout.view(x)


def _mapped(x: Tensor, scale: Tensor, shift: Tensor, layout: Layout) -> Tensor:
    a, b = layout.over(layout.lay(scale)), layout.over(layout.lay(shift))
    return layout.view(x) * a + b


def _before(
    grad: Tensor,
    x: Tensor,
    scale: Tensor,
    shift: Tensor,
    residual: Tensor | None,
    act: str,
    layout: Layout,
) -> Tensor:
    g = layout.view(grad).to(statistics_dtype(x.dtype))
    if act == "none":
        return g
    pre = _mapped(x, scale, shift, layout)
    if residual is not None:
        pre = pre + layout.view(residual)
    return before(g, pre, act)
