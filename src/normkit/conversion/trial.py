"""One norm beside another, on a few random numbers."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normkit.conversion.certificate import rounding
from normkit.conversion.differing import difference, leaves
from normkit.conversion.full_precision import full_precision
from normkit.conversion.reading import Reading
from normkit.inspection import undisturbed
from normkit.inspection.site import Site

PLAIN: dict[str, Any] = {"device": "cpu", "dtype": torch.float32}  # whatever the defaults are
POSITIONS = 4  # along each spatial axis


def is_exact(old: nn.Module, new: nn.Module, x: Tensor) -> bool:
    """Whether two modules agree in eval mode but for rounding."""
    return _agree(_ask(old, x), _ask(new, x))


def misread(site: Site, reading: Reading, x: Tensor) -> str:
    """Why a norm of an unknown class is not what its names say; empty if it is.

    A class may derive from a batch norm and compute something else: its forward is compared with
    what its scale, shift and statistics give in the formula of its kind.
    """
    said = _ask(site.module, x)
    if isinstance(said, str):
        return f"its own forward could not be checked ({said})"
    with undisturbed(site.module):
        expected = _formula(site, reading, x)
        for after in (site.drop, site.act):
            expected = expected if after is None else after(expected)
    same = _agree(said, [expected])
    return "" if same else f"its forward computes more than the {site.kind} it is derived from"


def materialised(site: Site) -> Site:
    """The site with a copy of its module that has numbers, for what is on the meta device."""
    module = copy.deepcopy(site.module).to_empty(device="cpu").float()
    drawn = torch.Generator("cpu").manual_seed(0)
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.is_floating_point():
            tensor.data = torch.rand(tensor.shape, generator=drawn, **PLAIN) + 0.5
    inside = dict(zip(map(id, site.module.modules()), module.modules(), strict=True))
    act, drop = (None if m is None else inside[id(m)] for m in (site.act, site.drop))
    return replace(site, module=module, act=act, drop=drop)


def numbers(channels: int, rank: int, like: Tensor, norm: Any = None) -> Tensor:
    """The same few samples every time, without a trace in torch's random state."""
    drawn = torch.Generator("cpu").manual_seed(0)
    # nn.LayerNorm((C, H, W)) insists on its size
    sides = tuple(getattr(norm, "normalized_shape", ())[1:]) or (POSITIONS,) * rank
    x = torch.randn(2, channels, *sides, generator=drawn, **PLAIN)
    return x.to(device=like.device, dtype=like.dtype)


def _ask(module: nn.Module, x: Tensor) -> Any:
    """What a module gives in eval mode, or the name of the error."""
    try:
        with undisturbed(module), full_precision(module):
            return leaves(module.forward(x.clone()))
    except Exception as error:
        return type(error).__name__


def _agree(a: Any, b: Any) -> bool:
    if isinstance(a, str) or isinstance(b, str) or not a or not b:
        return False
    return difference(a, b) <= rounding(a[0].dtype)


def _formula(site: Site, reading: Reading, x: Tensor) -> Tensor:
    weight, bias, eps = reading.weight, reading.bias, reading.eps
    if reading.mean is not None:
        return F.batch_norm(x, reading.mean, reading.var, weight, bias, False, 0.0, eps)
    if site.kind in ("bn", "sync_bn"):
        return F.batch_norm(x, None, None, weight, bias, True, 0.0, eps)
    if site.kind == "in":
        return F.instance_norm(x, weight=weight, bias=bias, eps=eps)
    if site.kind == "gn":
        return F.group_norm(x, site.groups or 1, weight, bias, eps)
    last, shape = x.movedim(1, -1), (x.shape[1],)
    if site.kind == "rms":
        y = F.rms_norm(last, shape, weight, eps)
        return (y if bias is None else y + bias).movedim(-1, 1)
    return F.layer_norm(last, shape, weight, bias, eps).movedim(-1, 1)
