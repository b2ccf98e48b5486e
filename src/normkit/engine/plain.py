"""The four passes as differentiable torch expressions: the specification of the backends.

Used where an expression is better than a call: under torch.compile, which fuses it; under
torch.func transforms, forward-mode derivatives and torch.jit.trace, which look into it; and in the
backward of a backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from normkit.core.layout import Layout
from normkit.core.moments import Moments
from normkit.core.precision import statistics_dtype
from normkit.core.statistics import MapResult
from normkit.engine.epilogue import AffineMap, before, epilogue


def moments(x: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    cells = layout.view(x).to(statistics_dtype(x.dtype))
    near = layout.near(cells).detach()
    apart = cells - layout.over(near)
    middle = layout.mean(apart)
    var = layout.mean((apart - layout.over(middle)).square())
    return layout.lift(near + middle), layout.lift(var)


def affine(x: Tensor, map: AffineMap, layout: Layout) -> Tensor:
    residual = None if map.residual is None else layout.view(map.residual)
    y = epilogue(_mapped(x, map, layout), residual, map.act)
    return layout.unview(y.to(x.dtype))


def sums(
    grad: Tensor, x: Tensor, map: AffineMap, layout: Layout, grad_residual: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    g = _before(grad, x, map, layout)
    da, db = layout.sum(g * _centred(x, map.center, layout)), layout.sum(g)
    kept = layout.unview(g.to(x.dtype)) if grad_residual else None
    return layout.lift(da), layout.lift(db), kept


def input_gradient(
    grad: Tensor,
    x: Tensor,
    map: AffineMap,
    constant: Tensor | None,
    slope: Tensor | None,
    layout: Layout,
) -> Tensor:
    g = _before(grad, x, map, layout)
    dx = layout.unview((g * _over(map.scale, layout)).to(x.dtype))
    return dx + moments_gradient(x, constant, slope, map.center, layout)


def moments_gradient(
    x: Tensor,
    constant: Tensor | None,
    slope: Tensor | None,
    center: Tensor | None,
    layout: Layout,
) -> Tensor:
    """constant + slope · (x − center): what the moments' gradients add to the input's."""
    dx = torch.zeros_like(layout.view(x))
    if slope is not None:
        dx = dx + _over(slope, layout) * _centred(x, center, layout)
    if constant is not None:
        dx = dx + _over(constant, layout)
    return layout.unview(dx.to(x.dtype))


def repeated(
    x: Tensor,
    residual: Tensor | None,
    act: str,
    layout: Any,
    result: Callable[[Moments], MapResult],
) -> list[Tensor]:
    """The output of a layer that makes its map once more, and its gates if they are wanted."""
    found = result(Moments(*moments(x, layout), layout.count))
    size = layout.rows, layout.columns
    scale, shift, center = found.map.each(lambda t: t.expand(size))
    y = affine(x, AffineMap(scale, shift, center, residual, act), layout)
    return [y] if found.gate is None else [y, found.gate.expand(size)]


def gradients_again(
    outputs: Callable[..., Sequence[Tensor]],
    inputs: Sequence[Tensor | None],
    needs: Sequence[bool],
    *grads: Tensor | None,
) -> list[Tensor | None]:
    """Of x, residual and parameters, where someone looks into a backward: autograd differentiates
    ``outputs`` of them, which are made once more. ``grads`` are those of the outputs.

    They end at these inputs, of which the outputs have aliases: they do not go on through what x
    was made of to another of them, and a tensor that is given twice has two.
    """
    further = torch.is_grad_enabled()  # whether there will be another backward
    with torch.enable_grad():
        own = [None if t is None else t.view_as(t) for t in inputs]
        pairs = [(y, g) for y, g in zip(outputs(*own), grads, strict=False) if g is not None]
        wanted = [t for t, need in zip(own, needs, strict=True) if need and t is not None]
        found = iter(
            torch.autograd.grad(
                [y for y, _ in pairs],
                wanted,
                [g for _, g in pairs],
                create_graph=further,
                allow_unused=True,
            )
            if wanted
            else ()
        )
    back = [
        next(found) if need and t is not None else None for t, need in zip(own, needs, strict=True)
    ]
    if needs[1] and own[1] is None:  # a residual is not kept where nothing follows the sum
        back[1] = grads[0]
    return back


def again_of(
    expression: Callable[..., Tensor], there: Sequence[bool]
) -> Callable[..., list[Tensor | None]]:
    """The backward of a replayed step where someone looks into it, by an expression of x, residual
    and parameters, which gets None for those that are not ``there``."""

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
            return [expression(x, residual, *(next(saved) if each else None for each in there))]

        return gradients_again(outputs, [x, residual, *parameters], needs, grad)

    return again


def _mapped(x: Tensor, map: AffineMap, layout: Layout) -> Tensor:
    y = _centred(x, map.center, layout) * _over(map.scale, layout)
    return y if map.shift is None else y + _over(map.shift, layout)


def _centred(x: Tensor, center: Tensor | None, layout: Layout) -> Tensor:
    cells = layout.view(x)
    return cells if center is None else cells - _over(center, layout)


def _over(table: Tensor, layout: Layout) -> Tensor:
    return layout.over(layout.lay(table))


def _before(grad: Tensor, x: Tensor, map: AffineMap, layout: Layout) -> Tensor:
    g = layout.view(grad).to(statistics_dtype(x.dtype))
    if map.act == "none":
        return g
    pre = _mapped(x, map, layout)
    if map.residual is not None:
        pre = pre + layout.view(map.residual)
    return before(g, pre, map.act)


def pixels(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    correction: int,
    act: str,
) -> Tensor:
    """Positional normalization: statistics of each pixel, parameters of each channel."""
    wide = x.to(statistics_dtype(x.dtype))
    apart = wide - wide.mean(1, keepdim=True)
    square = apart.square().sum(1, keepdim=True)
    y = apart * torch.rsqrt(square / (x.shape[1] - correction) + eps)
    return epilogue(_scaled(y, weight, bias), residual, act).to(x.dtype)


def pixels_again(
    eps: float, correction: int, act: str, there: Sequence[bool]
) -> Callable[..., list[Tensor | None]]:
    """``again_of`` pixels; ``there`` says whether there is a weight, and a bias."""

    def expression(
        x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        return pixels(x, weight, bias, residual, eps, correction, act)

    return again_of(expression, there)


def _scaled(y: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """With the parameters of each channel that there are."""
    shape = (-1, *(1,) * (y.dim() - 2))
    y = y if weight is None else y * weight.view(shape)
    return y if bias is None else y + bias.view(shape)


def squashed(
    x: Tensor,
    alpha: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    act: str,
) -> Tensor:
    """tanh(alpha · x) of each value, then the parameters of each channel."""
    wide = statistics_dtype(x.dtype)
    y = torch.tanh(alpha.to(wide) * x.to(wide))
    return epilogue(_scaled(y, weight, bias), residual, act).to(x.dtype)


def squashed_again(act: str, there: Sequence[bool]) -> Callable[..., list[Tensor | None]]:
    """``again_of`` dynamic tanh; ``there`` says whether there are weight, bias and alpha."""

    def expression(
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        alpha: Tensor,
    ) -> Tensor:
        return squashed(x, alpha, weight, bias, residual, act)

    return again_of(expression, there)
