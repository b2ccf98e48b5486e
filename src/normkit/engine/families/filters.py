"""Weight standardization of one convolution, or of many, in one launch each way.

One launch for each convolution is cheap on the device and dear on the host: a model has dozens of
them, and the arithmetic of all together takes less time than to ask for it.

One program a filter: with c = w − mean(w) and E = Σc²,

    out = c / std,   std = √(E/count + eps), or √(E/count) + eps (OUTSIDE)
    dw = (g − mean(g)) / std − c·Σ(g·c) / (std²·count·√(E/count + eps, or + 0))
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from normkit.engine.triton.launch import Launch
from normkit.engine.triton.passes import power_of_two


def one(weight: Tensor, count: int, eps: float, outside: bool, dtype: torch.dtype) -> Tensor:
    """(w − mean) / deviation of each filter of a weight."""
    return _Filters.apply(weight, count, eps, outside, dtype)


def many(
    weights: Sequence[Tensor], less: int, eps: float, outside: bool, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """(w − mean) / deviation of every filter of every weight."""
    return _Together.apply(less, eps, outside, dtype, *weights)


class _Filters(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, count: int, eps: float, outside: bool, dtype: torch.dtype
    ) -> Tensor:
        out = torch.empty_like(weight, dtype=dtype)
        ctx.given = weight.shape[0], weight.shape[1:].numel(), count, eps, outside
        _launches(*ctx.given)[0](weight, out)
        ctx.save_for_backward(weight)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        (weight,) = ctx.saved_tensors
        if torch.is_grad_enabled():
            return expression(weight, grad, *ctx.given[2:]), None, None, None, None
        if grad.stride() != weight.stride():
            grad = torch.empty_like(weight, dtype=grad.dtype).copy_(grad)
        out = torch.empty_like(weight)
        _launches(*ctx.given)[1](grad, weight, out)
        return out, None, None, None, None


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
    width = power_of_two(size)
    warps = max(1, min(8, width // 256))
    numbers, constants = (size, float(count), eps), (outside, width)
    return (
        Launch(filters_kernel, (filters,), numbers, constants, warps),
        Launch(filters_gradient_kernel, (filters,), numbers, constants, warps),
    )


WIDTH = 512  # weights at a time


class _Together(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, less: int, eps: float, outside: bool, dtype: torch.dtype, *weights: Tensor
    ) -> Any:
        first = weights[0]
        plan = _plan(tuple(w.shape for w in weights), first.device)
        flat = torch.cat([_in_memory_order(w) for w in weights])
        out = torch.empty_like(flat, dtype=dtype)
        plan.launches(less, eps, outside)[0](flat, out, plan.begins, plan.sizes)
        ctx.save_for_backward(*weights)
        ctx.given = less, eps, outside, plan
        ctx.set_materialize_grads(False)
        return tuple(_shaped(out, w, at) for w, at in zip(weights, plan.offsets, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        weights = ctx.saved_tensors
        less, eps, outside, plan = ctx.given
        if torch.is_grad_enabled():
            return (
                None,
                None,
                None,
                None,
                *(
                    None if g is None else expression(w, g, w[0].numel() - less, eps, outside)
                    for w, g in zip(weights, grads, strict=True)
                ),
            )
        kind = next((g.dtype for g in grads if g is not None), None)
        if kind is None:
            return None, None, None, None, *grads
        flat = torch.cat([_in_memory_order(w) for w in weights])
        given = [_gradient(g, w, kind) for g, w in zip(grads, weights, strict=True)]
        out = torch.empty_like(flat)
        start = plan.launches(less, eps, outside)[1]
        start(torch.cat(given), flat, out, plan.begins, plan.sizes)
        return (
            None,
            None,
            None,
            None,
            *(
                None if g is None else _shaped(out, w, at)
                for g, w, at in zip(grads, weights, plan.offsets, strict=True)
            ),
        )


class _Plan:
    """Where each filter begins among all of them, and how long it is."""

    def __init__(self, shapes: tuple[torch.Size, ...], device: torch.device) -> None:
        lengths = [shape[1:].numel() for shape in shapes]
        sizes = [n for shape, n in zip(shapes, lengths, strict=True) for _ in range(shape[0])]
        self.sizes = torch.tensor(sizes, dtype=torch.int32, device=device)
        self.begins = torch.tensor(
            [0, *torch.tensor(sizes).cumsum(0)[:-1].tolist()], dtype=torch.int64, device=device
        )
        self.offsets = [0]
        for shape in shapes[:-1]:
            self.offsets.append(self.offsets[-1] + shape.numel())
        self.filters = len(sizes)
        self.made: dict[Any, tuple[Any, Any]] = {}

    def launches(self, less: int, eps: float, outside: bool) -> tuple[Any, Any]:
        key = less, eps, outside
        if key not in self.made:
            kinds = all_filters_kernel, all_filters_gradient_kernel
            numbers, constants = (less, eps), (outside, WIDTH)
            forward, backward = (Launch(k, (self.filters,), numbers, constants) for k in kinds)
            self.made[key] = forward, backward
        return self.made[key]


@lru_cache(maxsize=64)
def _plan(shapes: tuple[torch.Size, ...], device: torch.device) -> _Plan:
    return _Plan(shapes, device)


def _in_memory_order(weight: Tensor) -> Tensor:
    """The weight as a vector, filter by filter: a view."""
    if weight.is_contiguous():
        return weight.view(-1)
    return weight.movedim(1, -1).reshape(-1)


def _gradient(grad: Tensor | None, weight: Tensor, kind: torch.dtype) -> Tensor:
    """The gradient of a weight as a vector in the order of the weight's memory."""
    if grad is None:
        return torch.zeros(weight.numel(), dtype=kind, device=weight.device)
    if grad.stride() != weight.stride():
        grad = torch.empty_like(weight, dtype=kind).copy_(grad)
    return _in_memory_order(grad)


def _shaped(flat: Tensor, weight: Tensor, offset: int) -> Tensor:
    return flat.as_strided(weight.shape, weight.stride(), offset)


# ---------------------------------------------------------------- kernels


@triton.jit
def _deviation(weight, row, entry, mask, size, count, eps, OUTSIDE: tl.constexpr):
    """c, what it is divided by, and the root that has a derivative."""
    value = tl.load(weight + row * size + entry, mask=mask, other=0.0).to(tl.float32)
    apart = tl.where(mask, value - tl.sum(value, 0) / size, 0.0)
    square = tl.sum(apart * apart, 0) / count
    if OUTSIDE:
        root = tl.sqrt(square)
        return apart, root + eps, root
    root = tl.sqrt(square + eps)
    return apart, root, root


@triton.jit
def filters_kernel(
    weight, out, size, count, eps, OUTSIDE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    entry = tl.arange(0, WIDTH)
    mask = entry < size
    apart, std, _ = _deviation(weight, row, entry, mask, size, count, eps, OUTSIDE)
    tl.store(out + row * size + entry, (apart / std).to(out.dtype.element_ty), mask=mask)


@triton.jit
def filters_gradient_kernel(
    grad, weight, out, size, count, eps, OUTSIDE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    entry = tl.arange(0, WIDTH)
    mask = entry < size
    apart, std, root = _deviation(weight, row, entry, mask, size, count, eps, OUTSIDE)
    g = tl.load(grad + row * size + entry, mask=mask, other=0.0).to(tl.float32)
    along = tl.sum(g * apart, 0) / (std * std * count * root)
    dw = (g - tl.sum(g, 0) / size) / std - apart * along
    tl.store(out + row * size + entry, dw.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _long_deviation(flat, begin, size, count, eps, OUTSIDE: tl.constexpr, WIDTH: tl.constexpr):
    """The mean of a filter of any length, what it is divided by, and the root."""
    entry = tl.arange(0, WIDTH)
    total = tl.zeros((WIDTH,), tl.float32)
    for start in range(0, size, WIDTH):
        mask = start + entry < size
        total += tl.load(flat + begin + start + entry, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(total, 0) / size
    square = tl.zeros((WIDTH,), tl.float32)
    for start in range(0, size, WIDTH):
        mask = start + entry < size
        value = tl.load(flat + begin + start + entry, mask=mask, other=0.0).to(tl.float32)
        square += tl.where(mask, (value - mean) * (value - mean), 0.0)
    variance = tl.sum(square, 0) / count
    if OUTSIDE:
        root = tl.sqrt(variance)
        return mean, root + eps, root
    root = tl.sqrt(variance + eps)
    return mean, root, root


@triton.jit
def all_filters_kernel(
    flat, out, begins, sizes, less, eps, OUTSIDE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The filters of many convolutions, one after the other in memory: one program each."""
    row = tl.program_id(0)
    begin, size = tl.load(begins + row), tl.load(sizes + row)
    entry = tl.arange(0, WIDTH)
    mean, std, _ = _long_deviation(flat, begin, size, size - less, eps, OUTSIDE, WIDTH)
    for start in range(0, size, WIDTH):
        mask = start + entry < size
        value = tl.load(flat + begin + start + entry, mask=mask, other=0.0).to(tl.float32)
        at = out + begin + start + entry
        tl.store(at, ((value - mean) / std).to(out.dtype.element_ty), mask=mask)


@triton.jit
def all_filters_gradient_kernel(
    grad, flat, out, begins, sizes, less, eps, OUTSIDE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    begin, size = tl.load(begins + row), tl.load(sizes + row)
    entry = tl.arange(0, WIDTH)
    mean, std, root = _long_deviation(flat, begin, size, size - less, eps, OUTSIDE, WIDTH)
    total = tl.zeros((WIDTH,), tl.float32)
    along = tl.zeros((WIDTH,), tl.float32)
    for start in range(0, size, WIDTH):
        mask = start + entry < size
        value = tl.load(flat + begin + start + entry, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(grad + begin + start + entry, mask=mask, other=0.0).to(tl.float32)
        total += g
        along += g * (value - mean)
    middle = tl.sum(total, 0) / size
    slope = tl.sum(along, 0) / (std * std * (size - less) * root)
    for start in range(0, size, WIDTH):
        mask = start + entry < size
        value = tl.load(flat + begin + start + entry, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(grad + begin + start + entry, mask=mask, other=0.0).to(tl.float32)
        dw = (g - middle) / std - (value - mean) * slope
        tl.store(out + begin + start + entry, dw.to(out.dtype.element_ty), mask=mask)
