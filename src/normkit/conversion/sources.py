"""Which norms of a model can be converted, and why the others cannot."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.utils import parametrize

from normkit.conversion.reading import OWN, Reading, plain
from normkit.inspection.site import Site
from normkit.layers.base import Normalizer
from normkit.layers.norm_act import NormAct

READABLE = ("bn", "sync_bn", "frozen_bn", "gn", "in", "ln", "pn", "rms")
"""Kinds of other libraries whose scale, shift and statistics can be carried."""
WHY_NOT = {
    "lazy_bn": "it has no channels yet: run one batch through the model first",
    "lazy_in": "it has no channels yet: run one batch through the model first",
    "split_bn": "it holds further batch norms for parts of the batch, which would be lost",
    "iabn": "its scale is stored in another form and its activation works in place",
}


def norm_of(module: nn.Module) -> nn.Module:
    """The norm itself, without the activation around it."""
    return module.norm if isinstance(module, NormAct) else module


def read(site: Site) -> Reading | str:
    """What the norm knows; or why it cannot be converted."""
    norm = norm_of(site.module)
    reason = _unknown(site, norm) or _computed(norm) or _replaced(site, norm)
    if reason:
        return reason
    if isinstance(norm, Normalizer):
        return OWN.get(norm.card.name, plain)(norm)
    return plain(norm)


def _unknown(site: Site, norm: nn.Module) -> str:
    if site.kind in WHY_NOT:
        return WHY_NOT[site.kind]
    if isinstance(norm, Normalizer):
        return ""
    if site.kind not in READABLE:
        return f"{site.class_name} is no normalization that another could take over from"
    if site.channel_axis != 1:
        return "it normalizes the last axis; here channels are on axis 1"
    if site.channels is None:
        return "it does not say how many channels it has"
    for name in ("weight", "bias", "running_mean", "running_var"):
        tensor = getattr(norm, name, None)
        if isinstance(tensor, Tensor) and tensor.shape != (site.channels,):
            return f"its {name} has shape {tuple(tensor.shape)}: not one number a channel"
    return ""


def _computed(norm: nn.Module) -> str:
    """Tensors that are not parameters like any other: to convert would end what computes them."""
    if parametrize.is_parametrized(norm):
        names = ", ".join(dict(norm.parametrizations.items()))  # type: ignore[operator, union-attr]
        return f"its {names} is computed by a parametrization: remove that first"
    for name in ("weight", "bias"):
        if name + "_orig" in norm._parameters or name + "_v" in norm._parameters:
            return f"its {name} is computed by a hook, as of pruning or weight norm: end that first"
    return ""


def _replaced(site: Site, norm: nn.Module) -> str:
    if "forward" in vars(norm) or "forward" in vars(site.module):
        return "its forward was replaced on the instance, as offloading tools do"
    return ""
