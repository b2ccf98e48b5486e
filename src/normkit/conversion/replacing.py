"""Another module in the place of a norm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from normkit.conversion.edit import Edit, Successor
from normkit.conversion.fused_forward import Fused
from normkit.conversion.values import Kinds, equal, follow, same, tensors, values
from normkit.errors import OptionError
from normkit.layers.base import Normalizer
from normkit.layers.norm_act import NormAct

# Dictionaries of hooks that get a module, its input and its output: these mean the same for any
# module in the same place. The dictionaries themselves are handed over, so that the handles a
# user holds remove the hooks from whichever module is in the model.
HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_is_full_backward_hook",
)
ROOT = (
    "The model itself is the norm, and nothing can take its place. Try to wrap it first, model = "
    "nn.Sequential(model), or build the layer with normkit.make or from_batch_norm."
)


class ReplaceModule(Edit):
    """Put ``new`` where a module is, at every one of its paths.

    ``roles`` says which parameter of the new module means the same as which of the old one: of
    those an optimizer's momentum goes on. A parameter that both modules hold needs no mention.
    """

    def __init__(
        self,
        paths: Sequence[str] | str,
        new: nn.Module,
        *,
        old: nn.Module | None = None,
        roles: Mapping[str, str] | None = None,
    ) -> None:
        self.paths = (paths,) if isinstance(paths, str) else tuple(paths)
        self.new = new
        self.old = old
        self.roles = dict(roles or {})
        self.description = f"{', '.join(self.paths)} becomes {type(new).__name__}"
        self._values = {} if old is None else values(old)
        self._hooks = {name: vars(new)[name] for name in HOOKS}
        self._mode = new.training
        self._kinds: Kinds = {}
        self._done = False

    def check(self, model: nn.Module) -> None:
        if "" in self.paths:
            raise OptionError(ROOT)
        for path in self.paths:
            parent, name = _place(model, path)
            there = parent._modules.get(name)
            if there is None or there is not (self.old or there):
                raise OptionError(
                    f"{path} is not the module that the plan was made for. The model has changed "
                    "since: make a new plan."
                )
            self.old = there
            _refuse_in_fused(parent, path, self.new)
        assert self.old is not None
        if self._values and not equal(values(self.old), self._values):
            raise OptionError(
                f"The values of {self.paths[0]} have changed since the plan was made, as by "
                "training, loading or moving the model. Make a new plan."
            )

    def check_undo(self, model: nn.Module) -> None:
        for path in self.paths:
            parent, name = _place(model, path)
            if parent._modules.get(name) is not self.new:
                raise OptionError(
                    f"{path} is no longer the module that the plan has put there. Undo what came "
                    "later first."
                )
            _refuse_in_fused(parent, path, self.old)

    def do(self, model: nn.Module) -> None:
        if self.old is None:
            self.check(model)
        assert self.old is not None
        self._values, self._mode = values(self.old), self.new.training
        self._kinds = {name: (t.device, t.dtype) for name, t in tensors(self.new).items()}
        for name in HOOKS:
            setattr(self.new, name, vars(self.old)[name])
        self._done = True
        for path in self.paths:
            parent, name = _place(model, path)
            parent._modules[name] = self.new  # an existing key keeps its place in the order

    def undo(self, model: nn.Module) -> None:
        if not self._done or self.old is None:
            return
        for path in self.paths:
            parent, name = _place(model, path)
            parent._modules[name] = self.old
        for name, own in self._hooks.items():
            setattr(self.new, name, own)
        follow(self.old, self.new, self._mode, self._kinds)
        with torch.no_grad():  # parameters that both modules hold may have been trained
            for name, tensor in tensors(self.old).items():
                kept = self._values[name]
                if not tensor.is_meta and not same(tensor, kept.to(tensor)):
                    tensor.copy_(kept)
        self._done = False

    def successors(self) -> list[Successor]:
        assert self.old is not None
        before = {_short(name): p for name, p in self.old.named_parameters()}
        held = {id(p) for p in before.values()}
        # gates and the like are trained like a shift; where there is none, like what there is
        home = before.get("bias", next(iter(before.values()), None))
        found = []
        for path, new in self.new.named_parameters():
            if id(new) in held:
                continue
            name = _short(path)
            role = self.roles.get(name)
            after = before.get(name if role is None else role, home)
            same = role in before and before[role].shape == new.shape
            found.append(Successor(new, after, same))
        return found


def _short(name: str) -> str:
    """The name of a parameter in the norm itself, whether a NormAct is around it or not."""
    return name.removeprefix("norm.")


def _refuse_in_fused(parent: nn.Module, path: str, module: nn.Module | None) -> None:
    """A forward that ``fuse`` has rewritten gives the norm a sum and an activation to do."""
    if isinstance(parent, Fused) and not isinstance(module, Normalizer | NormAct):
        raise OptionError(
            f"{path} does the activation after it since normkit.fuse, which "
            f"{type(module).__name__} cannot. Convert and undo before fuse, on a copy of the model."
        )


def _place(model: nn.Module, path: str) -> tuple[nn.Module, str]:
    above, _, name = path.rpartition(".")
    return model.get_submodule(above), name
