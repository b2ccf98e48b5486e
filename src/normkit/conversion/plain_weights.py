"""Convolutions of classes that normalize their own weight, as plain ones."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.overrides import TorchFunctionMode

from normkit.conversion.belongings import is_hooked
from normkit.inspection import WeightSite, undisturbed
from normkit.layers.weight import WeightNormalizer, normalized_tensors

PLAIN = {"conv1d": nn.Conv1d, "conv2d": nn.Conv2d, "conv3d": nn.Conv3d}


def can_be_plain(site: WeightSite) -> bool:
    """Whether a layer computes its weight in a way that can be computed once and for all."""
    if normalized_tensors(site.module):
        return True
    return site.kind in ("ws", "scaled_ws") and _call(site.module) is not None


def plain_form(layer: nn.Module) -> nn.Module:
    """A layer with a plain weight that computes the same: another one, or a changed copy."""
    if normalized_tensors(layer):
        return WeightNormalizer.fold(copy.deepcopy(layer))
    call = _call(layer)
    if call is None or not isinstance(layer, _ConvNd):
        return layer
    name, (_, weight, bias, stride, padding, dilation, groups) = call
    kind: Any = PLAIN[name]
    made: nn.Module = kind(
        layer.in_channels,
        layer.out_channels,
        layer.kernel_size,
        stride,
        padding,
        dilation,
        groups,
        bias=bias is not None,
        device=weight.device,
        dtype=weight.dtype,
    )
    made.weight = nn.Parameter(weight.detach().clone(), layer.weight.requires_grad)
    if bias is not None:
        made.bias = nn.Parameter(bias.detach().clone(), bias.requires_grad)
    return made.train(layer.training)


def _call(layer: Any) -> tuple[str, tuple[Any, ...]] | None:
    """The one call of a convolution that a layer makes of its very input, with all arguments."""
    if not isinstance(layer, _ConvNd) or layer.padding_mode != "zeros" or is_hooked(layer):
        return None
    spatial = [2 * d * (k - 1) + 1 for k, d in zip(layer.kernel_size, layer.dilation, strict=True)]
    weight = layer.weight
    x = torch.zeros(1, layer.in_channels, *spatial, device=weight.device, dtype=weight.dtype)
    calls = _Calls()
    with undisturbed(layer), calls:
        layer.forward(x)
    usual = (x, None, None, layer.stride, layer.padding, layer.dilation, layer.groups)
    if len(calls.seen) != 1:
        return None
    name, given = calls.seen[0]
    return (name, given) if given[0] is x and given[3:] == usual[3:] else None


class _Calls(TorchFunctionMode):
    """Notes the convolutions that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, tuple[Any, ...]]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in PLAIN:
            self.seen.append((name, args))
        return func(*args, **(kwargs or {}))
