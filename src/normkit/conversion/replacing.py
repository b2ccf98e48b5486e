"""Another module in the place of a norm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from normkit.conversion.edit import Edit, Successor
from normkit.errors import OptionError

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
Kinds = dict[str, tuple[torch.device, torch.dtype]]
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
        self._values = {} if old is None else _values(old)
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
        assert self.old is not None
        if self._values and not _equal(_values(self.old), self._values):
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

    def do(self, model: nn.Module) -> None:
        if self.old is None:
            self.check(model)
        assert self.old is not None
        self._values, self._mode = _values(self.old), self.new.training
        self._kinds = {name: (t.device, t.dtype) for name, t in _tensors(self.new).items()}
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
        _follow(self.old, self.new, self._mode, self._kinds)
        with torch.no_grad():  # parameters that both modules hold may have been trained
            for name, tensor in _tensors(self.old).items():
                kept = self._values[name]
                if not tensor.is_meta and not same(tensor, kept.to(tensor)):
                    tensor.copy_(kept)
        self._done = False

    def successors(self) -> list[Successor]:
        assert self.old is not None
        before = dict(self.old.named_parameters())
        held = {id(p) for p in before.values()}
        home = before.get("weight", next(iter(before.values()), None))
        found = []
        for name, new in self.new.named_parameters():
            if id(new) in held:
                continue
            role = self.roles.get(name)
            after = home if role is None else before.get(role, home)
            same = role in before and before[role].shape == new.shape
            found.append(Successor(new, after, same))
        return found


def _place(model: nn.Module, path: str) -> tuple[nn.Module, str]:
    above, _, name = path.rpartition(".")
    return model.get_submodule(above), name


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _values(module: nn.Module) -> dict[str, Tensor]:
    return {name: t.detach().clone() for name, t in _tensors(module).items()}


def same(a: Tensor, b: Tensor) -> bool:
    """Equal, a NaN with a NaN too; a tensor without values equals any."""
    return a.is_meta or torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())


def _equal(now: dict[str, Tensor], then: dict[str, Tensor]) -> bool:
    return now.keys() == then.keys() and all(
        value.device == then[name].device
        and value.dtype == then[name].dtype
        and value.shape == then[name].shape
        and same(value, then[name])
        for name, value in now.items()
    )


def _follow(old: nn.Module, new: nn.Module, mode: bool, then: Kinds) -> None:
    """What was done to the whole model in the meantime counts for the old module too."""
    if new.training != mode:
        old.train(new.training)
    for name, now in _tensors(new).items():
        if now.is_floating_point() and name in then:
            device, dtype = then[name]
            if now.dtype != dtype and isinstance(now, nn.Parameter):
                old.to(now.dtype)
            if now.device != device:
                old.to(now.device)
