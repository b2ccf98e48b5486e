"""A plan to turn the norms of a model into another kind."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from normkit.conversion.elsewhere import kept_elsewhere
from normkit.conversion.places import folding_method, neighbour, rank_of
from normkit.conversion.planned import Optimizers as Optimizers
from normkit.conversion.planned import Plan as Plan
from normkit.conversion.replacing import ROOT, ReplaceModule
from normkit.conversion.rules import build
from normkit.conversion.sharing import tie, untied
from normkit.conversion.targets import find_target
from normkit.conversion.wrappers import refuse_unchangeable
from normkit.errors import NormkitError, OptionError
from normkit.inspection import Survey, select, survey


def plan_conversion(
    model: nn.Module,
    to: str | type,
    where: Any = None,
    *,
    example: Any = None,
    optimizer: Optimizers = None,
    **options: Any,
) -> Plan:
    """A plan to turn the norms of a model into another kind. Nothing is changed yet.

    ``to`` is a name of the catalog such as "gn" or "ubn", or "torch_bn", "torch_gn", "sync_bn",
    or one of these classes; ``options`` are those of the layer. ``where`` chooses norms, see
    ``select``. ``example`` is an input of the model: it shows what feeds what, and is what
    ``apply`` measures with. ``optimizer``, one or several, will get the new parameters.

    Each layer takes over what it can: scale, shift, running statistics, eps, momentum, mode,
    device and type, a fused activation, hooks. The printed plan says what is carried, what
    starts anew, what is lost, and why a norm is left as it is.

    >>> import torch, normkit as nk
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8)).eval()
    >>> plan = nk.plan_conversion(model, "rbn")
    >>> plan.apply(torch.randn(2, 3, 9, 9)).exact
    True
    >>> plan.undo()
    """
    refuse_unchangeable(model)
    target = find_target(to)
    target.check(options)
    sites = select(_survey(model, example), where)
    edits, steps, folding = [], [], set()
    for site in sites:
        if site.path == "":
            raise OptionError(ROOT)
        rank, like = rank_of(site, model), neighbour(site, model)
        with torch.inference_mode(False):  # its tensors could not be trained
            new, step = build(site, target, options, rank=rank, like=like)
        if new is not None:
            edits.append(ReplaceModule(site.paths, new, old=site.module))
            folding.add(folding_method(site, model))
        steps.append(step)
    tie(edits)
    broken = untied(model, edits)
    steps = [replace(s, lost=(*s.lost, *broken.get(s.path, ()))) for s in steps]
    title = f"{type(model).__name__} to {target.name}"
    notes = [
        f"{method} would take the new layers for batch norms: convert to torch_bn before it."
        for method in sorted(filter(None, folding))
        if target.name != "torch_bn"
    ]
    notes += kept_elsewhere(model, edits)
    return Plan(model, edits, steps, example=example, optimizer=optimizer, title=title, notes=notes)


def _survey(model: nn.Module, example: Any) -> Survey:
    try:
        return survey(model, None if example is False else example)
    except NormkitError:
        raise
    except Exception as error:
        raise OptionError(
            f"The model fails on the given input: {type(error).__name__}: {error}"
        ) from error
