"""Which norms of a model can be converted: what each is as a batch norm, or why it cannot be."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from normkit.conversion.forward_probe import difference, full_precision, leaves, noise, rounding
from normkit.core.trained import TrainedBN
from normkit.inspection import Site, undisturbed
from normkit.inspection.checks import is_quantized
from normkit.inspection.kinds import layer_of
from normkit.layers.base import Normalizer
from normkit.layers.norm_act import NormAct

LAZY = "it has no channels yet: run one batch through the model first"
REFUSED = {
    "lazy_bn": LAZY,
    "lazy_in": LAZY,
    "split_bn": "it holds further batch norms for parts of the batch, which would be lost",
    "iabn": "its scale is stored in another form and its activation works in place",
}
OTHER = ("evo", "frn", "grn", "lrn", "simple", "other")  # kinds that are no relatives of batch norm
TRUSTED = ("normkit", "torch")  # whose classes compute what their names say
TABLES = ("weight", "bias", "running_mean", "running_var")
SHOWN = 3
POSITIONS = 4  # along each spatial axis, of the numbers that a norm is tried with


def norm_of(module: nn.Module) -> nn.Module:
    """The norm itself, without the activation around it."""
    return module.norm if isinstance(module, NormAct) else module


def read(site: Site, rank: int = 2, like: Tensor | None = None) -> TrainedBN | str:
    """What the norm is as a batch norm; or why it cannot be converted.

    ``rank`` is the number of spatial axes of its input; ``like`` tells device and type where it
    has no tensors.
    """
    norm = site.norm
    reason = _unreadable(site, norm) or _computed(norm)
    if "forward" in vars(norm) or "forward" in vars(site.module):
        reason = reason or "its forward was replaced on the instance, as offloading tools do"
    if reason:
        return reason
    bn = _as_batch_norm(site, like)
    if site.library in TRUSTED and not site.own_forward:
        return bn
    if bn.weight.is_meta:
        if not site.own_forward:
            return bn
        site, like = _with_values(site), None
    return _misread(site, rank, like) or bn


def _as_batch_norm(site: Site, like: Tensor | None) -> TrainedBN:
    norm = site.norm
    if isinstance(norm, Normalizer):
        return norm.as_batch_norm(like)
    pools = site.card is not None and site.card.pools_samples
    return replace(TrainedBN.read(norm, site.channels, like), pools_samples=pools)


def damaged(sites: Iterable[Site]) -> list[str]:
    """A caution for tables that no training leaves: they are taken over as they are."""
    cautions = []
    for site in sites:
        cautions += [f"{site.path}: its {what}." for what in _as_batch_norm(site, None).damage()]
    if len(cautions) > SHOWN:
        cautions[SHOWN:] = [f"So it is with {len(cautions) - SHOWN} more tables."]
    return [*cautions, "Try normkit.diagnose(model, loader) first."] if cautions else []


def _unreadable(site: Site, norm: nn.Module) -> str:
    if site.kind in REFUSED:
        return REFUSED[site.kind]
    if _is_quantized(norm):
        return "it is quantized: convert the model before it is quantized"
    if isinstance(norm, Normalizer):
        return ""
    if site.kind in OTHER:
        return f"{site.class_name} is no normalization that another could take over from"
    if site.channel_axis != 1:
        return "it normalizes the last axis; here channels are on axis 1"
    if site.channels is None:
        return "it does not say how many channels it has"
    for name in TABLES:
        tensor = getattr(norm, name, None)
        if isinstance(tensor, Tensor) and tensor.shape != (site.channels,):
            return f"its {name} has shape {tuple(tensor.shape)}: not one number a channel"
    return ""


def _is_quantized(norm: nn.Module) -> bool:
    """Whether it works with integers, as torch.ao's norms of the same names do."""
    tables = [t for name in TABLES if isinstance(t := getattr(norm, name, None), Tensor)]
    whole = any(t.is_quantized or not t.is_floating_point() for t in tables)
    return whole or is_quantized(norm)


def _computed(norm: nn.Module) -> str:
    """Tensors that are not parameters like any other: to convert would end what computes them."""
    if parametrize.is_parametrized(norm):
        names = ", ".join(dict(norm.parametrizations.items()))  # type: ignore[operator, union-attr]
        return f"its {names} is computed by a parametrization: remove that first"
    for name in ("weight", "bias"):
        if name + "_orig" in norm._parameters or name + "_v" in norm._parameters:
            return f"its {name} is computed by a hook, as of pruning or weight norm: end that first"
    return ""


# -------------------------------------------------------------------- does it do what it says?


def _misread(site: Site, rank: int, like: Tensor | None) -> str:
    """Why a norm of an unknown class is not what its names say; empty if it is.

    A class may derive from a batch norm and compute something else: its forward is compared with
    what its scale, shift and statistics give in the formula of its kind.
    """
    bn = _as_batch_norm(site, like)
    x = numbers(bn, rank)
    output = output_in_eval(site.module, x)
    if isinstance(output, str):
        return f"its own forward could not be checked ({output})"
    with undisturbed(site.module):
        for expected in _formulas(site, bn, x):
            for after in (site.drop, site.act):
                expected = expected if after is None else after(expected)
            if _agree(output, [expected]):
                return ""
    return f"its forward computes more than the {site.kind} it is derived from"


def _formulas(site: Site, bn: TrainedBN, x: Tensor) -> Iterator[Tensor]:
    """What a norm of this kind gives for x; names leave open over which axes."""
    weight, bias, eps = bn.weight, bn.bias, bn.eps
    if bn.tracked:
        yield F.batch_norm(x, bn.mean, bn.var, weight, bias, False, 0.0, eps)
        return
    if bn.pools_samples:
        yield F.batch_norm(x, None, None, weight, bias, True, 0.0, eps)
        return
    layer = layer_of(site.kind)
    if layer is not None:
        groups = {"groups": site.groups or 1} if "groups" in layer.options() else {}
        yield layer.from_trained(bn, **groups)[0].eval()(x)
    last, shape = x.movedim(1, -1), (x.shape[1],)
    yield F.layer_norm(last, shape, weight, bias, eps).movedim(-1, 1)
    yield (F.rms_norm(last, shape, weight, eps) + bias).movedim(-1, 1)


def _with_values(site: Site) -> Site:
    """The site with a copy of its module that has numbers, for what is on the meta device."""
    module = copy.deepcopy(site.module).to_empty(device="cpu").float()
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.is_floating_point():
            tensor.data = noise(tuple(tensor.shape), torch.empty(0, device="cpu")).abs() + 0.5
    inside = dict(zip(map(id, site.module.modules()), module.modules(), strict=True))
    act, drop = (None if m is None else inside[id(m)] for m in (site.act, site.drop))
    return replace(site, module=module, act=act, drop=drop)


def numbers(bn: TrainedBN, rank: int, norm: nn.Module | None = None) -> Tensor:
    """A few samples that a norm can be tried with, the same ones every time."""
    # nn.LayerNorm((C, H, W)) insists on its size
    sides = tuple(getattr(norm, "normalized_shape", ())[1:]) or (POSITIONS,) * rank
    return noise((2, bn.channels, *sides), bn.weight)


def is_exact(old: nn.Module, new: nn.Module, x: Tensor) -> bool:
    """Whether two modules agree in eval mode but for rounding."""
    a, b = output_in_eval(old, x), output_in_eval(new, x)
    return not isinstance(a, str) and not isinstance(b, str) and _agree(a, b)


def output_in_eval(module: nn.Module, x: Tensor) -> list[Tensor] | str:
    """What a module gives in eval mode, or the name of the error."""
    try:
        with undisturbed(module), full_precision(module):
            return leaves(module.forward(x.clone()))
    except Exception as error:
        return type(error).__name__


def _agree(a: list[Tensor], b: list[Tensor]) -> bool:
    return bool(a and b) and difference(a, b) <= rounding(a[0].dtype)
