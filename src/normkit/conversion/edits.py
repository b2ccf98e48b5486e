"""Changes to a model, each of which can be taken back exactly; plans are made of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from normkit.errors import OptionError
from normkit.inspection import refuse_wrapped
from normkit.layers.base import Normalizer
from normkit.layers.domain_in_use import layers_with_domains
from normkit.layers.norm_act import NormAct

Modules = Mapping[str, nn.Module]
NONE: Modules = MappingProxyType({})
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


@dataclass(frozen=True, eq=False)
class Successor:
    """A parameter that an edit brings into the model, as optimizers have to know it."""

    new: nn.Parameter
    after: nn.Parameter | None
    """The parameter of the old model whose group it joins; None: there is none."""
    same_role: bool = False
    """Whether it means the same as that one, so that momentum can go on."""


class Edit(ABC):
    """One change, all of it or nothing; ``undo`` gives back the very objects that were there."""

    description: str

    def check(self, model: nn.Module, new: Modules = NONE) -> None:  # noqa: B027  most can be done
        """Raise a NormkitError if ``do`` could not be done, once ``new`` modules are in place."""

    def check_undo(self, model: nn.Module) -> None:  # noqa: B027  likewise
        """Raise a NormkitError if something else stands on the change by now."""

    @abstractmethod
    def do(self, model: nn.Module) -> None:
        """Change the model."""

    @abstractmethod
    def undo(self, model: nn.Module) -> None:
        """Take the change back."""

    def successors(self) -> list[Successor]:
        """The parameters that ``do`` has brought, and whose places they take."""
        return []

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.description}>"


def do_all(model: nn.Module, edits: Sequence[Edit]) -> None:
    """Do all edits in their order; on an error those done so far are taken back."""
    done: list[Edit] = []
    try:
        for edit in edits:
            edit.check(model)
            done.append(edit)
            edit.do(model)
    except BaseException:
        undo_all(model, done)
        raise


def undo_all(model: nn.Module, edits: Sequence[Edit]) -> None:
    """Take edits back, the last first."""
    for edit in reversed(edits):
        edit.undo(model)


def check_all(model: nn.Module, edits: Sequence[Edit]) -> None:
    """Raise what ``do_all`` would raise, as far as it can be told without changing anything."""
    new = {path: edit.new for edit in replacements(edits) for path in edit.paths}
    for edit in edits:
        edit.check(model, new)


def refuse_unchangeable(model: Any) -> None:
    """An error, with the fix, for a model that something has taken note of."""
    refuse_wrapped(model)
    for path, module in model.named_modules():
        if module._compiled_call_impl is not None:
            raise OptionError(
                f"{path or 'The model'} is compiled in place, and would not notice a change. "
                "Convert it before calling compile()."
            )


def count_hooks(module: nn.Module) -> int:
    """How many hooks run when the module does."""
    return sum(len(vars(module)[name] or ()) for name in HOOKS if name.endswith("hooks"))


def replacements(edits: Sequence[Edit]) -> list[ReplaceModule]:
    return [edit for edit in edits if isinstance(edit, ReplaceModule)]


def final_tensors(edits: Sequence[Edit]) -> list[dict[str, Tensor]]:
    """What the tensors of each replacement will be when all edits are done."""
    finals = []
    for edit in replacements(edits):
        final = tensors(edit.new)
        for one in edits:
            for other in one.parts if isinstance(one, SetTensors) else (one,):
                if not isinstance(other, SetTensor):
                    continue
                for path in edit.paths:
                    name = other.path.removeprefix(f"{path}.")
                    if name in final and name != other.path:
                        final[name] = other.values_for(final[name])
        finals.append(final)
    return finals


# -------------------------------------------------------------------- another module


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
        self._values = {} if old is None else copies(old)
        self._hooks = {name: vars(new)[name] for name in HOOKS}
        self._mode = new.training
        self._kinds: dict[str, tuple[torch.device, torch.dtype]] = {}
        self._done = False

    def check(self, model: nn.Module, new: Modules = NONE) -> None:
        if "" in self.paths:
            raise OptionError(ROOT)
        for path in self.paths:
            parent, name = _place(model, path)
            current = parent._modules.get(name)
            if current is None or current is not (self.old or current):
                raise OptionError(
                    f"{path} is not the module that the plan was made for. The model has changed "
                    "since: make a new plan."
                )
            self.old = current
            _refuse_in_fused(parent, path, self.new)
        assert self.old is not None
        if self._values and not _equal(tensors(self.old), self._values):
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
        self._values, self._mode = copies(self.old), self.new.training
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
        self._follow(self.old)
        with torch.no_grad():  # parameters that both modules hold may have been trained
            for name, tensor in tensors(self.old).items():
                before = self._values[name]
                if not tensor.is_meta and not same(tensor, before.to(tensor)):
                    tensor.copy_(before)
        self._done = False

    def _follow(self, old: nn.Module) -> None:
        """What was done to the whole model in the meantime counts for the old module too."""
        if self.new.training != self._mode:
            old.train(self.new.training)
        both = layers_with_domains(self.new), layers_with_domains(old)  # one each, or none
        for mine, theirs in zip(*both, strict=False):
            if mine.domains == theirs.domains:
                theirs.follow_domain(mine.domain)
        for name, now in tensors(self.new).items():
            if now.is_floating_point() and name in self._kinds:
                device, dtype = self._kinds[name]
                if now.dtype != dtype and isinstance(now, nn.Parameter):
                    old.to(now.dtype)
                if now.device != device:
                    old.to(now.device)

    def successors(self) -> list[Successor]:
        assert self.old is not None
        before = {_short(name): p for name, p in self.old.named_parameters()}
        held = {id(p) for p in before.values()}
        # gates and the like are trained like a shift; where there is none, like what there is
        home = before.get("bias", next(iter(before.values()), None))
        come = []
        for path, new in self.new.named_parameters():
            if id(new) in held:
                continue
            name = _short(path)
            role = self.roles.get(name)
            after = before.get(name if role is None else role, home)
            come.append(Successor(new, after, role in before and before[role].shape == new.shape))
        return come


def _short(name: str) -> str:
    """The name of a parameter in the norm itself, whether a NormAct is around it or not."""
    return name.removeprefix("norm.")


def _refuse_in_fused(parent: nn.Module, path: str, module: nn.Module | None) -> None:
    """A forward that ``fuse`` has rewritten gives the norm a sum and an activation to do."""
    if hasattr(type(parent), "fused_source") and not isinstance(module, Normalizer | NormAct):
        raise OptionError(
            f"{path} does the activation after it since normkit.fuse, which "
            f"{type(module).__name__} cannot. Convert and undo before fuse, on a copy of the model."
        )


def _place(model: nn.Module, path: str) -> tuple[nn.Module, str]:
    above, _, name = path.rpartition(".")
    return model.get_submodule(above), name


# -------------------------------------------------------------------- other values


class SetTensor(Edit):
    """Give a parameter or buffer, named by its path, other values: a number or a tensor."""

    def __init__(
        self,
        path: str,
        value: Tensor | float,
        description: str = "",
        planned_for: Tensor | None = None,
    ) -> None:
        """``planned_for`` are the values that it must have until then; None: any."""
        self.path, self.value, self.planned_for = path, value, planned_for
        self.description = description or f"{path} gets new values"
        self._before: Tensor | None = None

    def check(self, model: nn.Module, new: Modules = NONE) -> None:
        tensor = self._find(model, new)
        if isinstance(self.value, Tensor) and self.value.shape != tensor.shape:
            raise OptionError(
                f"{self.path} has shape {tuple(tensor.shape)}, the values for it "
                f"{tuple(self.value.shape)}."
            )
        if self.planned_for is not None and not same(
            self.planned_for, tensor.detach().to(self.planned_for.device)
        ):
            raise OptionError(
                f"The values of {self.path} have changed since the plan was made, as by training. "
                "Plan again."
            )

    def values_for(self, tensor: Tensor) -> Tensor:
        """What a tensor will be."""
        return torch.empty_like(tensor, requires_grad=False).copy_(torch.as_tensor(self.value))

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

    def _find(self, model: nn.Module, new: Modules = NONE) -> Tensor:
        above, _, name = self.path.rpartition(".")
        root = model
        for path, module in new.items():
            if above == path or above.startswith(f"{path}."):
                root, above = module, above[len(path) + 1 :]
                break
        try:
            tensor = getattr(root.get_submodule(above), name)
        except AttributeError:
            tensor = None
        if not isinstance(tensor, Tensor):
            raise OptionError(f"The model has no tensor {self.path!r}.")
        return tensor


class SetTensors(Edit):
    """Give many tensors other values: one change, told in one line."""

    def __init__(self, parts: Sequence[SetTensor], description: str) -> None:
        self.parts = tuple(parts)
        self.description = description

    def check(self, model: nn.Module, new: Modules = NONE) -> None:
        for part in self.parts:
            part.check(model, new)

    def do(self, model: nn.Module) -> None:
        do_all(model, self.parts)

    def undo(self, model: nn.Module) -> None:
        undo_all(model, self.parts)


def tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by their names."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def copies(module: nn.Module) -> dict[str, Tensor]:
    """Copies of them."""
    return {name: t.detach().clone() for name, t in tensors(module).items()}


def same(a: Tensor, b: Tensor) -> bool:
    """Equal, a NaN with a NaN too; a tensor without values equals any."""
    return a.is_meta or torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())


def _equal(now: dict[str, Tensor], then: dict[str, Tensor]) -> bool:
    """The same names, devices, types and values."""
    return now.keys() == then.keys() and all(
        value.device == then[name].device
        and value.dtype == then[name].dtype
        and value.shape == then[name].shape
        and same(value, then[name])
        for name, value in now.items()
    )
