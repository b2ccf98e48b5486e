"""Freeze norms, in a way that train() does not undo.

A frozen module gets a subclass of its own class, made when needed. It keeps everything it has and
is an instance of its class still; only ``train`` and ``extra_repr`` change. It is a class and not
an attribute of the instance, so that shallow copies, replicas and unpickled modules have it; and it
is no replacement by another layer, so that parameters stay what optimizers know and state_dicts
keep their keys.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Self

from torch import nn

from normkit.conversion.edits import refuse_unchangeable
from normkit.errors import NothingToDo, OptionError, ShapeError, nearest
from normkit.inspection import Site, select, survey

PARTS = ("statistics", "affine")
CHOICES = {"both": PARTS, **{part: (part,) for part in PARTS}}


def freeze(model: nn.Module, what: str = "both", where: Any = None) -> list[str]:
    """Fix the statistics of norms, their affine map, or both; returns the paths of those norms.

        statistics  normalizes with the running statistics and leaves them alone, in train() too
        affine      the norm's parameters are not trained
        both        all of it: the norm is a fixed map

    ``where`` chooses norms as in ``select``: "layer1.*", "stem", "kind:bn", a function. Norms of
    normkit, torch.nn, timm and others are frozen alike: each keeps its class, its parameters and
    its place in optimizers and state_dicts. Norms without running statistics, such as gn, have
    an affine part only.

    Frozen norms say so in their repr. They stay frozen through train() and eval(), copies,
    torch.save of the model, swa_utils.update_bn, and load_state_dict: that changes values, never
    what is frozen. A state_dict does not say what is frozen, as it does not say what requires
    gradients: freeze the model it is loaded into, before or after. model.requires_grad_() reaches
    frozen parameters like all others.

    Freezing twice is freezing once; "statistics" and then "affine" is "both".

    >>> import torch, normkit as nk
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8))
    >>> nk.freeze(model, "statistics")
    ['1']
    >>> model.train()[1].training
    False
    >>> nk.unfreeze(model)
    ['1']
    """
    parts = _parts("freeze", what)
    planned: list[tuple[Site, nn.Module, list[str], list[str]]] = []
    for site in _chosen(model, where):
        if site.kind.startswith("lazy"):
            raise ShapeError(f"{site.path} is lazy. Run one batch through the model first.")
        norm = site.norm
        # the parameters of a fused activation are not the norm's own
        beside = {id(p) for part in (site.act, site.drop) if part for p in part.parameters()}
        affine = [name for name, p in norm.named_parameters() if id(p) not in beside]
        fixed = site.frozen and "statistics" not in frozen_parts(norm)  # by its nature
        has = {"statistics": site.tracked and not fixed, "affine": bool(affine)}
        if possible := [part for part in parts if has[part]]:
            planned.append((site, norm, possible, affine))
    if not planned:
        raise NothingToDo(
            f"freeze found no norm with {' or '.join(parts)} to freeze. Norms of single "
            "samples keep no running statistics; frozen batch norms are frozen by their nature."
        )
    before = [(norm, frozen_parts(norm)) for _, norm, _, _ in planned]
    try:
        for _, norm, possible, affine in planned:
            hold(norm, possible, affine)
    except BaseException:
        for norm, held in before:
            release(norm, [part for part in parts if part not in held])
        raise
    return [site.path for site, _, _, _ in planned]


def unfreeze(model: nn.Module, what: str = "both", where: Any = None) -> list[str]:
    """Take ``freeze`` back; returns the paths of the norms that were frozen.

    Parameters get the requires_grad they had, and statistics the mode of the last train() or
    eval(): the model is what it would be without the freezing. Layers of kind frozen_bn are not
    frozen but made so: convert them to bn, and model.requires_grad_(True) to train their scales.
    """
    parts = _parts("unfreeze", what)
    norms = {site.path: site.norm for site in _chosen(model, where)}
    states = {path: state_of(norm) for path, norm in norms.items()}
    chosen = {path: norms[path] for path, s in states.items() if s and set(s.held) & set(parts)}
    if not chosen:
        raise NothingToDo(f"unfreeze found no norm with frozen {' or '.join(parts)}.")
    for norm in chosen.values():
        unfrozen_class(norm)  # an error for what cannot be taken back, before the first is
    for norm in chosen.values():
        release(norm, parts)
    return list(chosen)


def frozen(model: nn.Module) -> dict[str, str]:
    """The path of every norm that is frozen, and what of it: "statistics", "affine" or "both".

    A norm whose parameters were told to train since, as by model.requires_grad_(), has no frozen
    affine part.
    """
    parts = {path: frozen_parts(module) for path, module in model.named_modules()}
    return {path: _in_a_word(held) for path, held in parts.items() if held}


def _in_a_word(parts: tuple[str, ...]) -> str:
    return "both" if len(parts) == len(PARTS) else "".join(parts)


def _parts(verb: str, what: str) -> tuple[str, ...]:
    if what not in CHOICES:
        raise OptionError(f"{verb} got what={what!r}. {nearest(str(what), CHOICES)}")
    return CHOICES[what]


def _chosen(model: nn.Module, where: Any) -> tuple[Site, ...]:
    refuse_unchangeable(model)
    return select(survey(model), where)


# -------------------------------------------------------------------- the class of a frozen module

_classes: dict[type, type] = {}  # by the class without the mark


@dataclass
class FrozenState:
    """What is frozen, and what has to be put back."""

    mode: bool  # the mode that train() and eval() have asked for
    statistics: bool = False
    trainable: dict[str, bool] = field(default_factory=dict)  # requires_grad of the affine part

    @property
    def held(self) -> tuple[str, ...]:
        """The parts that ``unfreeze`` has something to put back of."""
        held = self.statistics, bool(self.trainable)
        return tuple(part for part, is_held in zip(PARTS, held, strict=True) if is_held)


class Frozen(nn.Module):
    """What comes before the module's own class."""

    _frozen: FrozenState

    def train(self, mode: bool = True) -> Self:
        super().train(mode)  # parts such as a drop layer follow
        self._frozen.mode = mode
        if self._frozen.statistics:
            self.training = False
        return self

    def extra_repr(self) -> str:
        parts = frozen_parts(self)
        mark = f"frozen={_in_a_word(parts)!r}" if parts else ""
        return ", ".join(filter(None, (super().extra_repr(), mark)))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # pickle finds classes by name, and this one has none
        reduced: Any = super().__reduce_ex__(max(int(protocol), 2))
        _, _, *state = reduced
        return (_blank, (unfrozen_class(self),), *state)


def state_of(module: nn.Module) -> FrozenState | None:
    """What is frozen of a module; None if nothing."""
    return module._frozen if isinstance(module, Frozen) else None


def frozen_parts(module: nn.Module) -> tuple[str, ...]:
    """What is frozen of a module now: none, one or both of PARTS."""
    state = state_of(module)
    if state is None:
        return ()
    trains = any(module.get_parameter(name).requires_grad for name in state.trainable)
    return tuple(part for part in state.held if part != "affine" or not trains)


def unfrozen_class(module: nn.Module) -> type[Any]:
    """The class that a module has without the mark."""
    plain = vars(type(module)).get("unfrozen_class")
    if isinstance(module, Frozen) and plain is None:
        raise OptionError(
            f"{type(module).__name__} has got another class since it was frozen, as by a "
            "parametrization. Take that away first."
        )
    return plain or type(module)


def hold(module: nn.Module, parts: Iterable[str], affine: Iterable[str]) -> None:
    """Freeze parts of a module; ``affine`` are the names of its parameters."""
    if not isinstance(module, Frozen):
        module._frozen = FrozenState(mode=module.training)  # type: ignore[assignment]
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
    plain = unfrozen_class(module)
    if "statistics" in parts and state.statistics:
        state.statistics = False
        module.training = state.mode
    if "affine" in parts:
        for name, parameter in module.named_parameters():
            trains = parameter.requires_grad  # told so since
            parameter.requires_grad_(trains or state.trainable.get(name, False))
        state.trainable = {}
    if not state.held:
        module.__class__ = plain
        del module._frozen


def carry_freezing(old: nn.Module, new: nn.Module) -> None:
    """Freeze what takes the place of a frozen module, as far as it has the parts.

    ``unfreeze`` then brings back what was before.
    """
    state = state_of(old)
    if state is None:
        return
    affine = [name for name, _ in new.named_parameters()]
    tracked = any(name.startswith("running_") for name, _ in new.named_buffers())
    parts = [part for part in frozen_parts(old) if (tracked if part == "statistics" else affine)]
    if parts:
        new.train(state.mode)
        hold(new, parts, affine)
        trainable, usual = state_of(new).trainable, any(state.trainable.values())  # type: ignore[union-attr]
        trainable.update({name: state.trainable.get(name, usual) for name in trainable})


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
        unfrozen_class(module).reset_running_stats(module)


def _blank(plain: type) -> Any:
    """A frozen module without contents, which copy and pickle fill."""
    marked = _frozen_class(plain)
    return marked.__new__(marked)
