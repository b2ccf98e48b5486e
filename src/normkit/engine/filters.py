"""Weight standardization in one launch forward and one backward, where Triton can."""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from normkit.core.layout import is_channels_last
from normkit.engine import backends
from normkit.engine.normalize import expression_wanted

MOST = 8192  # weights of a filter: they stay in registers


def standardized_filters(weight: Tensor, count: int, eps: float, outside: bool) -> Tensor | None:
    """(w − mean) / deviation of each filter, in the type autocast wants; None if Triton cannot.

    The deviation is the root of (sum of squares / count + eps), or eps is added to the root.
    """
    if expression_wanted() or not fits(weight):
        return None
    return _Filters.apply(weight, count, eps, outside)


def fits(weight: Tensor, most: int | None = MOST) -> bool:
    """Whether Triton can standardize a weight, with filters of up to so many weights."""
    if backends._forced == "torch":
        return False
    if not weight.is_cuda:
        interpreted = backends._forced == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
        if not (interpreted and weight.device.type == "cpu"):
            return False
    size = weight.shape[1:].numel()
    small = weight.dim() > 1 and size > 1 and (most is None or size <= most) and weight.shape[0] > 0
    dense = weight.is_contiguous() or is_channels_last(weight)
    known = weight.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return small and dense and known and backends._triton()[0] is not None


def wanted_type(weight: Tensor) -> torch.dtype:
    """The type of the result: what the convolution would turn it into."""
    kind = weight.device.type
    if weight.dtype == torch.float32 and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return weight.dtype


class _Filters(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, count: int, eps: float, outside: bool) -> Tensor:
        out = torch.empty_like(weight, dtype=wanted_type(weight))
        ctx.given = weight.shape[0], weight.shape[1:].numel(), count, eps, outside
        _launches(*ctx.given)[0](weight, out)
        ctx.save_for_backward(weight)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        (weight,) = ctx.saved_tensors
        if torch.is_grad_enabled():
            return expression(weight, grad, *ctx.given[2:]), None, None, None
        if grad.stride() != weight.stride():
            grad = torch.empty_like(weight, dtype=grad.dtype).copy_(grad)
        out = torch.empty_like(weight)
        _launches(*ctx.given)[1](grad, weight, out)
        return out, None, None, None


def expression(weight: Tensor, grad: Tensor, count: int, eps: float, outside: bool) -> Tensor:
    """The backward of a backward: through the plain expression."""
    axes = tuple(range(1, weight.dim()))
    wide = weight.float()
    apart = wide - wide.mean(axes, keepdim=True)
    square = apart.square().sum(axes, keepdim=True) / count
    std = square.sqrt() + eps if outside else (square + eps).sqrt()
    (found,) = torch.autograd.grad(apart / std, weight, grad.float(), create_graph=True)
    return found


@lru_cache(maxsize=1024)
def _launches(filters: int, size: int, count: int, eps: float, outside: bool) -> tuple[Any, Any]:
    from normkit.engine import triton_filters as kernels
    from normkit.engine.launch import Launch
    from normkit.engine.triton_backend import power_of_two

    width = power_of_two(size)
    warps = max(1, min(8, width // 256))
    numbers, constants = (size, float(count), eps), (outside, width)
    return (
        Launch(kernels.filters_kernel, (filters,), numbers, constants, warps),
        Launch(kernels.filters_gradient_kernel, (filters,), numbers, constants, warps),
    )
