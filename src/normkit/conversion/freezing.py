"""Freeze norms, in a way that train() does not undo."""

from __future__ import annotations

from typing import Any

from torch import nn

from normkit.conversion.marks import PARTS, hold, own_class, release, state_of
from normkit.conversion.wrappers import refuse_unchangeable
from normkit.errors import NothingToDo, OptionError, ShapeError, nearest
from normkit.inspection import select, survey
from normkit.inspection.site import Site
from normkit.layers.norm_act import NormAct

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
        norm = _norm_of(site)
        affine = _affine(site, norm)
        has = {"statistics": site.tracked and site.kind != "frozen_bn", "affine": bool(affine)}
        if possible := [part for part in parts if has[part]]:
            planned.append((site, norm, possible, affine))
    if not planned:
        raise NothingToDo(
            f"freeze found no norm with {' or '.join(parts)} to freeze. Norms such as gn keep no "
            "running statistics; those of kind frozen_bn are frozen by their nature."
        )
    before = [(norm, _held(norm)) for _, norm, _, _ in planned]
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
    frozen but made so: convert them to bn.
    """
    parts = _parts("unfreeze", what)
    norms = {site.path: _norm_of(site) for site in _chosen(model, where)}
    found = {path: norm for path, norm in norms.items() if set(_held(norm)) & set(parts)}
    if not found:
        raise NothingToDo(f"unfreeze found no norm with frozen {' or '.join(parts)}.")
    for norm in found.values():
        own_class(norm)  # an error for what cannot be taken back, before the first is
    for norm in found.values():
        release(norm, parts)
    return list(found)


def frozen(model: nn.Module) -> dict[str, str]:
    """The path of every norm that is frozen, and what of it: "statistics", "affine" or "both"."""
    states = {path: state_of(module) for path, module in model.named_modules()}
    return {path: str(state) for path, state in states.items() if state is not None}


def _parts(verb: str, what: str) -> tuple[str, ...]:
    if what not in CHOICES:
        raise OptionError(f"{verb} got what={what!r}. {nearest(str(what), CHOICES)}")
    return CHOICES[what]


def _chosen(model: nn.Module, where: Any) -> tuple[Site, ...]:
    refuse_unchangeable(model)
    return select(survey(model), where)


def _held(norm: nn.Module) -> tuple[str, ...]:
    state = state_of(norm)
    return () if state is None else state.parts


def _norm_of(site: Site) -> nn.Module:
    """The norm without what NormAct adds to it."""
    return site.module.norm if isinstance(site.module, NormAct) else site.module


def _affine(site: Site, norm: nn.Module) -> list[str]:
    """The names of the norm's own parameters; those of a fused activation are not its own."""
    beside = {id(p) for part in (site.act, site.drop) if part for p in part.parameters()}
    return [name for name, p in norm.named_parameters() if id(p) not in beside]
