"""What the surroundings of a norm tell about it."""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn

from normkit.inspection import Site

USUAL_RANK = 2
FOLDING = ("reparameterize", "fuse", "switch_to_deploy", "fuse_model")
"""Methods by which models fold their batch norms, reading scale, shift and statistics."""


def rank_of(site: Site, model: nn.Module) -> int:
    """How many spatial axes its input has: by its class, or what feeds it, or as for images."""
    fed_by = [] if site.fed_by is None else [model.get_submodule(site.fed_by)]
    for module in (site.module, *fed_by):
        for kind in type(module).__mro__:
            if found := re.search(r"([123])d$", kind.__name__, re.IGNORECASE):
                return int(found[1])
        if isinstance(module, nn.Linear):
            return 1
        if isinstance(dims := getattr(module, "dims", None), int):  # ours: bnet and ubn
            return dims
    return USUAL_RANK


def folding_method(site: Site, model: nn.Module) -> str | None:
    """A method of a module around the norm that folds it away, such as RepVGG.reparameterize."""
    path = site.path
    while path:
        path = path.rpartition(".")[0]
        around = type(model.get_submodule(path))
        for name in FOLDING:
            if callable(getattr(around, name, None)):
                return f"{around.__name__}.{name}"
    return None


def neighbour(site: Site, model: nn.Module) -> Tensor:
    """A tensor with the device and type of the model where the norm stands."""
    path = site.path
    while path:
        path = path.rpartition(".")[0]
        for parameter in model.get_submodule(path).parameters():
            lazy = isinstance(parameter, nn.UninitializedParameter)
            if not lazy and parameter.is_floating_point():
                return parameter.detach()
    return torch.empty(0, device="cpu")
