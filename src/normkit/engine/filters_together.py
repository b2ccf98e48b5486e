"""The weight standardization of many convolutions in one launch forward and one backward.

One launch for each convolution is cheap on the device and dear on the host: a model has dozens of
them, and the arithmetic of all together takes less time than to ask for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from normkit.engine.filters import expression, fits, wanted_type
from normkit.engine.normalize import expression_wanted

WIDTH = 512  # weights at a time


def standardized_together(
    weights: Sequence[Tensor], less: int, eps: float, outside: bool
) -> tuple[Tensor, ...] | None:
    """(w − mean) / deviation of every filter of every weight; None if Triton cannot.

    All weights have one type and device. ``less`` is what the variance is short of a mean: 0 or 1.
    """
    if expression_wanted() or not all(fits(weight, most=None) for weight in weights):
        return None
    return _Together.apply(less, eps, outside, *weights)


class _Together(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, less: int, eps: float, outside: bool, *weights: Tensor) -> Any:
        first = weights[0]
        plan = _plan(tuple(w.shape for w in weights), first.device)
        flat = torch.cat([_in_memory_order(w) for w in weights])
        out = torch.empty_like(flat, dtype=wanted_type(first))
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
                *(
                    None if g is None else expression(w, g, w[0].numel() - less, eps, outside)
                    for w, g in zip(weights, grads, strict=True)
                ),
            )
        kind = next((g.dtype for g in grads if g is not None), None)
        if kind is None:
            return None, None, None, *grads
        flat = torch.cat([_in_memory_order(w) for w in weights])
        given = [_gradient(g, w, kind) for g, w in zip(grads, weights, strict=True)]
        out = torch.empty_like(flat)
        start = plan.launches(less, eps, outside)[1]
        start(torch.cat(given), flat, out, plan.begins, plan.sizes)
        return (
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
            from normkit.engine import triton_filters as kernels
            from normkit.engine.launch import Launch

            kinds = kernels.all_filters_kernel, kernels.all_filters_gradient_kernel
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
