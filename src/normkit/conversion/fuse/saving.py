"""Let a model keep the inputs of its norms alone for backward, and make their outputs again."""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from normkit.engine.remaking import Remaking


class _Running(threading.local):
    """The blocks that forwards of this thread are in."""

    def __init__(self) -> None:
        self.blocks: list[Remaking | None] = []


_running = _Running()


def save_inputs(model: nn.Module) -> None:
    """From now on every forward of the model runs in a ``Remaking`` block. Twice is once."""
    if _begin in model._forward_pre_hooks.values():
        return
    model.register_forward_pre_hook(_begin)
    model.register_forward_hook(_end, always_call=True)
    for module in model.modules():
        if type(module) is nn.MaxPool2d and not module.return_indices:
            module.__class__ = IndexFreeMaxPool2d


def save_all(model: nn.Module) -> None:
    """As it was before ``save_inputs``."""
    for hooks, own in ((model._forward_pre_hooks, _begin), (model._forward_hooks, _end)):
        for key in [key for key, hook in hooks.items() if hook is own]:
            del hooks[key]
            model._forward_hooks_always_called.pop(key, None)
    for module in model.modules():
        if type(module) is IndexFreeMaxPool2d:
            module.__class__ = nn.MaxPool2d  # type: ignore[assignment]


def _begin(model: nn.Module, inputs: Any) -> None:
    # a compiler decides itself what it keeps and what it makes again
    compiling = torch.compiler.is_compiling()
    block = None if compiling or not torch.is_grad_enabled() else Remaking()
    if block is not None:
        block.__enter__()
    if not compiling:
        _running.blocks.append(block)


def _end(model: nn.Module, inputs: Any, output: Any) -> None:
    if torch.compiler.is_compiling():
        return
    block = _running.blocks.pop()
    if block is not None:
        block.__exit__(None, None, None)


class IndexFreeMaxPool2d(nn.MaxPool2d):
    """A pooling that keeps its input and not where the largest values were: eight bytes for each
    of them, as torch has it, and the input can often be made again. Backward pools once more."""

    def forward(self, input: Tensor) -> Tensor:
        if torch.compiler.is_compiling() or not (torch.is_grad_enabled() and input.requires_grad):
            return super().forward(input)
        how = self.kernel_size, self.stride, self.padding, self.dilation, self.ceil_mode
        pooled: Tensor = _MaxPool.apply(input, how)
        return pooled


class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, how: tuple[Any, ...]) -> Any:
        ctx.save_for_backward(x)
        ctx.how = how
        return F.max_pool2d(x, *how)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (dx,) = torch.autograd.grad(F.max_pool2d(x, *ctx.how), x, grads[0])
        return dx, None
