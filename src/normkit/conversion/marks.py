"""The mark on a module that is frozen: a subclass of its own class, made when needed.

A frozen module keeps everything it has and is an instance of its class still; only ``train`` and
``extra_repr`` change. It is a class and not an attribute of the instance, so that shallow copies,
replicas and unpickled modules have it; and it is no replacement by another layer, so that
parameters stay what optimizers know and state_dicts keep their keys.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Self

from torch import nn

from normkit.errors import OptionError

PARTS = ("statistics", "affine")
_classes: dict[type, type] = {}  # by the class without the mark


@dataclass
class State:
    """What is frozen, and what has to be put back."""

    mode: bool  # the mode that train() and eval() have asked for
    statistics: bool = False
    trainable: dict[str, bool] = field(default_factory=dict)  # requires_grad of the affine part

    @property
    def parts(self) -> tuple[str, ...]:
        held = self.statistics, bool(self.trainable)
        return tuple(part for part, is_held in zip(PARTS, held, strict=True) if is_held)

    def __str__(self) -> str:
        return "both" if len(self.parts) == len(PARTS) else "".join(self.parts)


class Frozen(nn.Module):
    """What comes before the module's own class."""

    _frozen: State

    def train(self, mode: bool = True) -> Self:
        super().train(mode)  # parts such as a drop layer follow
        self._frozen.mode = mode
        if self._frozen.statistics:
            self.training = False
        return self

    def extra_repr(self) -> str:
        return ", ".join(filter(None, (super().extra_repr(), f"frozen={str(self._frozen)!r}")))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # pickle finds classes by name, and this one has none
        made: Any = super().__reduce_ex__(max(int(protocol), 2))
        _, _, *state = made
        return (_blank, (own_class(self),), *state)


def state_of(module: nn.Module) -> State | None:
    """What is frozen of a module; None if nothing."""
    return module._frozen if isinstance(module, Frozen) else None


def own_class(module: nn.Module) -> type[Any]:
    """The class that a module has without the mark."""
    found = vars(type(module)).get("unfrozen_class")
    if isinstance(module, Frozen) and found is None:
        raise OptionError(
            f"{type(module).__name__} has got another class since it was frozen, as by a "
            "parametrization. Take that away first."
        )
    return found or type(module)


def hold(module: nn.Module, parts: Iterable[str], affine: Iterable[str]) -> None:
    """Freeze parts of a module; ``affine`` are the names of its parameters."""
    if not isinstance(module, Frozen):
        module._frozen = State(mode=module.training)  # type: ignore[assignment]
        module.__class__ = _frozen_class(type(module))
    state = state_of(module)
    assert state is not None
    if "statistics" in parts:
        state.statistics = True
        module.training = False
    if "affine" in parts:
        for name in affine:
            parameter = module.get_parameter(name)
            state.trainable.setdefault(name, parameter.requires_grad)
            parameter.requires_grad_(False)
            parameter.grad = None  # or the next step of the optimizer would still apply it


def release(module: nn.Module, parts: Iterable[str]) -> None:
    """Take freezing back; what the module was told in the meantime holds."""
    state = state_of(module)
    if state is None:
        return
    plain = own_class(module)
    if "statistics" in parts and state.statistics:
        state.statistics = False
        module.training = state.mode
    if "affine" in parts:
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(state.trainable.get(name, parameter.requires_grad))
        state.trainable = {}
    if not state.parts:
        module.__class__ = plain
        del module._frozen


def carry(old: nn.Module, new: nn.Module) -> None:
    """Freeze what takes the place of a frozen module, as far as it has the parts."""
    state = state_of(old)
    if state is None:
        return
    affine = [name for name, _ in new.named_parameters()]
    tracked = any(name.startswith("running_") for name, _ in new.named_buffers())
    parts = [part for part in state.parts if (tracked if part == "statistics" else affine)]
    if parts:
        new.train(state.mode)
        hold(new, parts, affine)


def _frozen_class(plain: type) -> Any:
    """The class with the mark: it says that it is the plain one, as far as anything asks."""
    if plain in _classes:
        return _classes[plain]
    own: dict[str, Any] = {
        "unfrozen_class": plain,
        "__module__": plain.__module__,
        "__qualname__": plain.__qualname__,
        "__doc__": plain.__doc__,
    }
    if hasattr(plain, "reset_running_stats"):  # as swa_utils.update_bn does with every batch norm
        own["reset_running_stats"] = _reset_running_stats
    return _classes.setdefault(plain, type(plain.__name__, (Frozen, plain), own))


def _reset_running_stats(module: Any) -> None:
    """Frozen statistics are not forgotten."""
    if not module._frozen.statistics:
        own_class(module).reset_running_stats(module)


def _blank(plain: type) -> Any:
    """A frozen module without contents, which copy and pickle fill."""
    marked = _frozen_class(plain)
    return marked.__new__(marked)
