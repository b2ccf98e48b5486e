"""The edits that plans are made of."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from normkit.conversion.attaching import Standardize as Standardize
from normkit.conversion.edit import Edit as Edit
from normkit.conversion.edit import Successor
from normkit.conversion.replacing import ReplaceModule as ReplaceModule
from normkit.errors import OptionError


class SetTensor(Edit):
    """Give a parameter or buffer, named by its path, other values: a number or a tensor."""

    def __init__(self, path: str, value: Tensor | float, description: str = "") -> None:
        self.path, self.value = path, value
        self.description = description or f"{path} gets new values"
        self._before: Tensor | None = None

    def check(self, model: nn.Module) -> None:
        tensor = self._find(model)
        if isinstance(self.value, Tensor) and self.value.shape != tensor.shape:
            raise OptionError(
                f"{self.path} has shape {tuple(tensor.shape)}, the values for it "
                f"{tuple(self.value.shape)}."
            )

    @torch.no_grad()
    def do(self, model: nn.Module) -> None:
        tensor = self._find(model)
        self._before = tensor.detach().clone()
        tensor.copy_(torch.as_tensor(self.value))

    @torch.no_grad()
    def undo(self, model: nn.Module) -> None:
        if self._before is not None:
            self._find(model).copy_(self._before)
            self._before = None

    def _find(self, model: nn.Module) -> Tensor:
        above, _, name = self.path.rpartition(".")
        try:
            tensor = getattr(model.get_submodule(above), name)
        except AttributeError:
            tensor = None
        if not isinstance(tensor, Tensor):
            raise OptionError(f"The model has no tensor {self.path!r}.")
        return tensor


class AddInputNorm(Edit):
    """Normalize the first input of the model, with a norm that becomes its child ``name``.

    A Sequential runs all its children, so there the norm becomes the first of them; elsewhere a
    hook calls it.
    """

    def __init__(self, norm: nn.Module, name: str = "input_norm") -> None:
        self.norm, self.name = norm, name
        self.description = f"{name} = {type(norm).__name__} before everything else"
        self._handle: RemovableHandle | None = None

    def check(self, model: nn.Module) -> None:
        if hasattr(model, self.name):
            raise OptionError(
                f"The model has an attribute {self.name!r} already, so no norm of that name can "
                "be added to its input."
            )

    def do(self, model: nn.Module) -> None:
        rest = dict(model._modules)
        model.add_module(self.name, self.norm)
        if type(model).forward is nn.Sequential.forward:
            for name, module in rest.items():  # to the end, in their order
                del model._modules[name]
                model._modules[name] = module
        else:
            hook = _Prepended(self.name)
            self._handle = model.register_forward_pre_hook(hook, with_kwargs=True)

    def undo(self, model: nn.Module) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        if model._modules.get(self.name) is self.norm:
            del model._modules[self.name]

    def successors(self) -> list[Successor]:
        return [Successor(p, None) for p in self.norm.parameters()]


class _Prepended:
    """A hook that looks the norm up by its name, so that copies of the model use their own."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        norm = model._modules[self.name]
        assert norm is not None
        if args:
            return (norm(args[0]), *args[1:]), kwargs
        first = next(iter(kwargs))
        return args, {**kwargs, first: norm(kwargs[first])}
