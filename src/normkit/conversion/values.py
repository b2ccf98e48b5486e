"""The tensors of a module: what they were, whether they still are, and where they went."""

from __future__ import annotations

import torch
from torch import Tensor, nn

Kinds = dict[str, tuple[torch.device, torch.dtype]]


def tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by their names."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def values(module: nn.Module) -> dict[str, Tensor]:
    """Copies of them."""
    return {name: t.detach().clone() for name, t in tensors(module).items()}


def same(a: Tensor, b: Tensor) -> bool:
    """Equal, a NaN with a NaN too; a tensor without values equals any."""
    return a.is_meta or torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())


def equal(now: dict[str, Tensor], then: dict[str, Tensor]) -> bool:
    """The same names, devices, types and values."""
    return now.keys() == then.keys() and all(
        value.device == then[name].device
        and value.dtype == then[name].dtype
        and value.shape == then[name].shape
        and same(value, then[name])
        for name, value in now.items()
    )


def follow(old: nn.Module, new: nn.Module, mode: bool, then: Kinds) -> None:
    """What was done to the whole model in the meantime counts for the old module too."""
    if new.training != mode:
        old.train(new.training)
    for name, now in tensors(new).items():
        if now.is_floating_point() and name in then:
            device, dtype = then[name]
            if now.dtype != dtype and isinstance(now, nn.Parameter):
                old.to(now.dtype)
            if now.device != device:
                old.to(now.device)
