"""Norms and normalized weights, folded into plain convolutions and linear layers."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import nn

from normkit.conversion.absorbing import refusal
from normkit.conversion.belongings import is_hooked
from normkit.conversion.fixed_maps import fixed_map
from normkit.conversion.fold_plan import FoldPlan
from normkit.conversion.pairing import Pair, pairs_of
from normkit.conversion.plain_weights import can_be_plain, plain_form
from normkit.conversion.wrappers import refuse_unchangeable
from normkit.inspection import Site, survey


def fold(model: nn.Module, example: Any = None) -> nn.Module:
    """A copy of the model for inference, with its norms folded into the layers before them.

    Folded are norms in eval mode that are a fixed map: bn in all forms, sync, frozen and ghost,
    shifted_bn, batch_renorm, bgn with whole channels and gbgn, of normkit, torch.nn, timm and
    torchvision; of bnet the depthwise convolution stays. Weights computed by ws, wn and cwn, or
    by classes such as timm's StdConv2d, become plain ones. A fused activation stays where it was.
    ``plan_fold`` tells what is left, and why.

    A norm is folded only if its layer feeds nothing else. That is seen in a run of the model on
    the example (a tensor, a tuple of positional or a mapping of keyword arguments) or on an input
    that is found by trying. The copy must then give the same output, or there is an error. Where
    no input is found, the order of registration decides and a warning says that nothing was
    checked.

    The copy has fewer layers and no statistics: it is not for training. The model is unchanged.

    >>> import torch, normkit as nk
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8)).eval()
    >>> nk.fold(model)
    Sequential(
      (0): Conv2d(3, 8, kernel_size=(3, 3), stride=(1, 1))
      (1): Identity()
    )
    """
    return plan_fold(model, example).apply()


def plan_fold(model: nn.Module, example: Any = None) -> FoldPlan:
    """What ``fold`` would do, to be printed; ``plan.apply()`` gives the copy.

    Nothing is changed: the model is run, if there is an input for it, and left as it was.
    """
    refuse_unchangeable(model)
    found = survey(model)
    weights = tuple(site.path for site in found.weights if can_be_plain(site))
    sites = {site.path: site for site in found}
    pairs, probe = pairs_of(model, sites, example)
    owners = Counter(id(p) for m in model.modules() for p in m._parameters.values())
    plan = FoldPlan(model, probe, weights)
    for path, pair in pairs.items():
        if isinstance(pair, str):
            plan.left[path] = pair
        elif reason := _refusal(model, sites[path], pair, owners, pair.layer in weights):
            plan.left[path] = reason
        else:
            plan.folded[path] = pair
    return plan


def _refusal(model: nn.Module, site: Site, pair: Pair, owners: Counter[int], computed: bool) -> str:
    """Why a norm cannot be folded into its layer; empty if it can."""
    found = fixed_map(site, pair.axes)
    if isinstance(found, str):
        return found
    if is_hooked(site.module):
        return "it has hooks that see its output"
    layer = model.get_submodule(pair.layer)
    if is_hooked(layer):
        return f"{pair.layer} has hooks that see its output"
    if any(owners[id(p)] > 1 for p in layer._parameters.values() if p is not None):
        return f"{pair.layer} shares its weight or bias with another layer"
    return refusal(plain_form(layer) if computed else layer, site.channels, pair.axes)
