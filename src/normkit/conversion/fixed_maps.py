"""Norms that are a fixed map in eval mode: a scale and a shift for each channel."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from normkit.conversion.reading import Reading
from normkit.conversion.sources import norm_of, read
from normkit.conversion.trial import misread, numbers
from normkit.inspection.site import Site
from normkit.layers.base import Normalizer
from normkit.layers.bgn import BGN
from normkit.layers.bnet import BNET, centre

DEPTHWISE = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


class FixedMap(NamedTuple):
    """y = then(scale · x + shift)."""

    scale: Tensor  # (C,)
    shift: Tensor  # (C,)
    then: nn.Module | None = None  # the depthwise convolution of bnet


def fixed_map(site: Site, axes: int | None = None) -> FixedMap | str:
    """The map of a norm, in float64 where the device has it; or why it has none.

    ``axes`` is the number of axes of its input, if known.
    """
    norm = norm_of(site.module)
    if isinstance(norm, Normalizer):
        return _own(norm, axes)
    if site.kind not in ("bn", "sync_bn", "frozen_bn", "in"):
        return "its statistics are of the input"
    if norm.training and site.kind != "frozen_bn":
        return "it is in training mode: try model.eval()"
    reading = read(site)
    if isinstance(reading, str):
        return reading
    if reading.mean is None or reading.var is None:
        return "it keeps no running statistics"
    if site.library != "torch" or site.own_forward:
        x = numbers(reading.mean.numel(), 2 if axes is None else axes - 2, reading.mean)
        if not x.is_meta and (reason := misread(site, reading, x)):
            return reason
    return _of_reading(reading)


@torch.no_grad()
def _of_reading(reading: Reading) -> FixedMap:
    assert reading.mean is not None and reading.var is not None
    mean, var = wide(reading.mean), wide(reading.var)
    scale = torch.rsqrt(var + reading.eps)
    if reading.weight is not None:
        scale = scale * wide(reading.weight)
    shift = -mean * scale
    return FixedMap(scale, shift if reading.bias is None else shift + wide(reading.bias))


@torch.no_grad()
def _own(norm: Normalizer, axes: int | None) -> FixedMap | str:
    if norm.training and not norm.card.same_in_eval:
        return "it is in training mode: try model.eval()"
    if norm.uses_moments():
        return "its map depends on the input"
    if isinstance(norm, BGN) and norm.channels % norm.groups:
        return "its groups cut channels, so the map depends on the position"
    if not norm.card.family and not isinstance(norm, BNET):
        return "it has no scale and shift that would be all it does"
    layer: Any = copy.deepcopy(norm)
    layer = layer if _is_narrow(norm) else layer.double()
    scale, shift = (table[0] for table in layer.compute(None, layer.state()).map)
    if not isinstance(norm, BNET) or norm.weight is None or norm.bias is None:
        return FixedMap(scale, shift)
    if axes == 2 or norm.kernel_size == 1:  # only the centre tap acts
        weight, bias = centre(layer.weight), layer.bias
        return FixedMap(weight * scale, weight * shift + bias)
    return FixedMap(scale, shift, _depthwise(norm))


def _depthwise(norm: BNET) -> nn.Module:
    """The convolution of bnet alone, with the same parameters."""
    weight, bias = norm.weight, norm.bias
    assert weight is not None and bias is not None
    made = DEPTHWISE[norm.dims](
        norm.channels,
        norm.channels,
        norm.kernel_size,
        padding=norm.kernel_size // 2,
        groups=norm.channels,
        device=weight.device,
        dtype=weight.dtype,
    )
    made.weight, made.bias = nn.Parameter(weight.detach()), nn.Parameter(bias.detach())
    made.weight.requires_grad_(weight.requires_grad)
    made.bias.requires_grad_(bias.requires_grad)
    return made.train(norm.training)


def wide(tensor: Tensor) -> Tensor:
    """In float64, or float32 where the device has no more."""
    return tensor.detach().to(torch.float32 if tensor.device.type == "mps" else torch.float64)


def _is_narrow(norm: nn.Module) -> bool:
    tensors = [*norm.parameters(), *norm.buffers()]
    return any(t.device.type == "mps" for t in tensors)
