"""Positional normalization as a whole on Triton: two passes forward, three backward.

One launch forward. Backward one, and a small one that adds up the parts of γ's and β's gradients.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from normkit.core.fusion import lie_dense
from normkit.core.layout import Channels, Layout, Pixels
from normkit.core.precision import statistics_dtype
from normkit.engine.backends import choose
from normkit.engine.epilogue import check, epilogue
from normkit.engine.normalize import dense, expression_wanted


class Pixel(NamedTuple):
    """What positional normalization does, beside its tensors."""

    eps: float
    correction: int  # 1: unbiased variance
    act: str
    layout: Pixels


def fused_pixels(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    eps: float,
    correction: int = 0,
    residual: Tensor | None = None,
    activation: str = "none",
) -> Tensor | None:
    """activation(weight · (x − mean)/√(var + eps) + bias + residual), statistics of each pixel.

    An expression for compilers, which make one kernel of it. Otherwise None unless Triton is the
    chosen backend: then ``normalize`` does it.
    """
    check(x, residual, activation)
    if expression_wanted():
        return expression(x, weight, bias, residual, eps, correction, activation)
    x = dense(x)
    if not (hasattr(choose(x, needed(x)), "moment_parts") and lie_dense(weight, bias)):
        return None
    return _Fused.apply(x, weight, bias, residual, Pixel(eps, correction, activation, Pixels.of(x)))


def needed(x: Tensor) -> Layout:
    """What a backend has to serve for it; not Pixels, of which the grids of other kernels may not
    hold so many: here one program takes several."""
    return Channels.of(x)


class _Fused(torch.autograd.Function):
    """Keeps x alone: the statistics are computed again where x has to be read anyway."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        pixel: Pixel,
    ) -> Any:
        ctx.save_for_backward(x, weight, bias, residual if pixel.act != "none" else None)
        ctx.pixel = pixel
        y = pixel.layout.like(x)
        _launches().write_map(x, weight, bias, residual, y, pixel)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        x, weight, bias, residual = given = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *_again(ctx, grad, given), None
        pixel, layout = ctx.pixel, ctx.pixel.layout
        dx = layout.like(x)
        dr = grad if ctx.needs_input_grad[3] else None
        keep = layout.like(x) if dr is not None and pixel.act != "none" else None
        dweight, dbias = _launches().write_gradients(
            grad, x, weight, bias, residual, keep, dx, pixel
        )
        return dx, dweight, dbias, dr if keep is None else keep, None


def _launches() -> ModuleType:
    from normkit.engine import pixel_launches  # needs Triton, which is here

    return pixel_launches


def _again(ctx: Any, grad: Tensor, given: Any) -> list[Tensor | None]:
    """The backward of a backward: through the plain expression, which autograd differentiates."""
    needs = ctx.needs_input_grad[:4]
    wanted = [t for t, need in zip(given, needs, strict=True) if need and t is not None]
    x, weight, bias, residual = given
    pixel = ctx.pixel
    y = expression(x, weight, bias, residual, pixel.eps, pixel.correction, pixel.act)
    flowing = iter(torch.autograd.grad(y, wanted, grad, create_graph=True))
    back = [
        next(flowing) if need and t is not None else None
        for t, need in zip(given, needs, strict=True)
    ]
    if needs[3] and given[3] is None:  # it was not kept, for nothing follows the sum
        back[3] = grad
    return back


def expression(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    correction: int,
    act: str,
) -> Tensor:
    """What the kernels compute, as autograd can differentiate it."""
    wide = x.to(statistics_dtype(x.dtype))
    apart = wide - wide.mean(1, keepdim=True)
    square = apart.square().sum(1, keepdim=True)
    y = apart * torch.rsqrt(square / (x.shape[1] - correction) + eps)
    if weight is not None and bias is not None:
        shape = (-1, *(1,) * (x.dim() - 2))
        y = y * weight.view(shape) + bias.view(shape)
    return epilogue(y, residual, act).to(x.dtype)
