"""Let a model keep the inputs of its norms alone for backward, and make their outputs again."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from normkit.engine.dispatch import looked_into
from normkit.engine.remaking import Remaking, others_watch

_classes: dict[type, type] = {}  # by the class before


def save_inputs(model: nn.Module) -> None:
    """From now on every forward of the model runs in a ``Remaking`` block. Twice is once."""
    if not isinstance(model, SavesInputs):
        model.__class__ = _saving_class(type(model))
    for module in model.modules():
        if type(module) is nn.MaxPool2d and not module.return_indices:
            module.__class__ = IndexFreeMaxPool2d


def save_all(model: nn.Module) -> None:
    """As it was before ``save_inputs``, of the model or of a part of it."""
    for module in model.modules():
        if isinstance(module, SavesInputs):
            module.__class__ = module.keeping_class
        elif type(module) is IndexFreeMaxPool2d:
            module.__class__ = nn.MaxPool2d  # type: ignore[assignment]


class SavesInputs(nn.Module):
    """What comes before the model's own class: hooks, tensors and methods stay what they were."""

    keeping_class: type

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # pickle finds classes by name, and this one has none
        reduced: Any = super().__reduce_ex__(max(int(protocol), 2))
        make, given, *state = reduced
        own = (self.keeping_class if each is type(self) else each for each in given)
        return (_blank, (make, tuple(own)), *state)


def _saving_class(keeping: type) -> Any:
    if keeping not in _classes:
        plain = keeping.forward  # type: ignore[attr-defined]

        @functools.wraps(plain)
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if stands_aside():
                return plain(self, *args, **kwargs)
            with Remaking():
                return plain(self, *args, **kwargs)

        own = {
            "forward": forward,
            "keeping_class": keeping,
            "__module__": keeping.__module__,
            "__qualname__": keeping.__qualname__,
            "__doc__": keeping.__doc__,
        }
        _classes[keeping] = type(keeping.__name__, (SavesInputs, keeping), own)
    return _classes[keeping]


def stands_aside() -> bool:
    """Whether outputs are kept after all: compilers decide for themselves what they keep,
    transforms take no hooks for saved tensors, and whoever has such hooks around the model, as
    checkpointing has, wants to see what is saved."""
    return looked_into() or not torch.is_grad_enabled() or others_watch()


def _blank(make: Any, given: tuple[Any, ...]) -> Any:
    """A module without contents, which copy and pickle fill."""
    module = make(*given)
    module.__class__ = _saving_class(type(module))
    return module


class IndexFreeMaxPool2d(nn.MaxPool2d):
    """A pooling that keeps its input and not where the largest values were: eight bytes for each
    of them, as torch has it, and the input can often be made again. Backward pools once more."""

    def forward(self, input: Tensor) -> Tensor:
        traced = not isinstance(input, Tensor)  # a stand-in of torch.fx
        if looked_into() or traced or not (torch.is_grad_enabled() and input.requires_grad):
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
