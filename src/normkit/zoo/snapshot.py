"""A model as it was, to tell whether it is that again."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

SMALL = 1 << 16  # numbers; larger tensors are not copied


class Snapshot:
    """Every module and tensor of a model by name: the objects themselves, modes and values."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules = modules_of(model)
        self.tensors = tensors_of(model)
        self._modes = {path: module.training for path, module in self.modules.items()}
        self._trained = {name: t.requires_grad for name, t in self.tensors.items()}
        # torch counts the changes of a tensor: a large one must not have been touched at all
        self._counts = {name: t._version for name, t in self.tensors.items()}
        self._values = {
            name: t.detach().clone() for name, t in self.tensors.items() if t.numel() <= SMALL
        }

    def differences(self, may_change: frozenset[str] = frozenset()) -> Iterator[str]:
        """What is not as it was; tensors that a run may change are named."""
        modules, tensors = modules_of(self.model), tensors_of(self.model)
        for what, now, then in (
            ("modules", list(modules), list(self.modules)),
            ("tensors", list(tensors), list(self.tensors)),
        ):
            if now != then:
                yield f"{what} came, went or changed places: {some(set(now) ^ set(then))}"
        for path, module in self.modules.items():
            if modules.get(path) is not module:
                yield f"{path} is another module"
            elif module.training != self._modes[path]:
                yield f"{path} is in another mode"
        for name, tensor in self.tensors.items():
            if tensors.get(name) is not tensor:
                yield f"{name} is another tensor"
            elif tensor.requires_grad != self._trained[name]:
                yield f"{name}: requires_grad changed"
            elif not self._kept(name, tensor) and name not in may_change:
                yield f"{name} has other values"

    def _kept(self, name: str, tensor: Tensor) -> bool:
        if tensor.is_meta or tensor._version == self._counts[name]:
            return True
        return name in self._values and torch.equal(tensor, self._values[name])


def modules_of(model: nn.Module) -> dict[str, nn.Module]:
    """Every module under every one of its paths."""
    return dict(model.named_modules(remove_duplicate=False))


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer under every one of its names."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {**parameters, **dict(model.named_buffers(remove_duplicate=False))}


def some(names: set[str]) -> str:
    """A few of the names."""
    more = ", …" if len(names) > 3 else ""
    return ", ".join(sorted(names)[:3]) + more
