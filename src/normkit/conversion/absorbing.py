"""A scale and a shift of the output, taken into the weight and bias of a layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.utils import parametrize

from normkit.conversion.fixed_maps import wide

# classes that pad or cast in their own forward and then use weight and bias like torch.nn
LINEAR_IN_WEIGHT = ("Conv2dSame", "Conv2dSameExport", "Linear")


def refusal(layer: nn.Module, channels: int | None, axes: int | None) -> str:
    """Why a layer cannot take in a map of so many channels; empty if it can.

    ``axes`` is the number of axes of its output, None if not known.
    """
    name = type(layer).__name__.removeprefix("Parametrized")
    weight: Any = layer._parameters.get("weight")
    if parametrize.is_parametrized(layer):
        return f"the weight of {name} is computed by a parametrization"
    lazy = isinstance(weight, nn.UninitializedParameter)
    if weight is None or lazy or type(weight.data) is not Tensor:
        return f"the weight of {name} is computed, lazy or packed"
    if not _is_plain(layer):
        return f"{name} has a forward of its own"
    if isinstance(layer, nn.Linear) and axes not in (None, 2):
        return "the channels of a linear layer are on the last axis"
    if channels != _out_channels(layer):
        return f"{name} gives {_out_channels(layer)} channels"
    return ""


def _is_plain(layer: nn.Module) -> bool:
    """Whether what a layer computes is linear in its weight, plus its bias."""
    if type(layer).__name__ in LINEAR_IN_WEIGHT:
        return "forward" not in vars(layer)
    writers = [
        next((base for base in type(layer).__mro__ if method in vars(base)), nn.Linear)
        for method in ("forward", "_conv_forward")
    ]
    torchs = all(base.__module__.startswith("torch.nn.modules") for base in writers)
    return torchs and "forward" not in vars(layer)


@torch.no_grad()
def absorb(layer: Any, scale: Tensor, shift: Tensor) -> None:
    """layer(x) becomes scale · layer(x) + shift; parameters are new, of the same type."""
    weight, bias = layer.weight, layer.bias
    by = _along_output(layer, scale)
    new = (wide(weight) * by).to(weight.dtype)
    if weight.dim() == 4 and weight.is_contiguous(memory_format=torch.channels_last):
        new = new.contiguous(memory_format=torch.channels_last)
    moved = shift if bias is None else wide(bias) * scale + shift
    layer.weight = nn.Parameter(new, requires_grad=weight.requires_grad)
    trainable = weight.requires_grad if bias is None else bias.requires_grad
    layer.bias = nn.Parameter(moved.to(weight.dtype), requires_grad=trainable)


def _along_output(layer: nn.Module, scale: Tensor) -> Tensor:
    """The scale, shaped so that it multiplies the weights of each output channel."""
    weight: Any = layer.weight
    if not isinstance(layer, _ConvTransposeNd):
        return scale.reshape(-1, *[1] * (weight.dim() - 1))
    # (in, out / groups, *kernel): the inputs of each group have output channels of their own
    each = scale.reshape(layer.groups, 1, -1)
    inputs = layer.in_channels // layer.groups
    table = each.expand(-1, inputs, -1).reshape(weight.shape[:2])
    return table.reshape(*weight.shape[:2], *[1] * (weight.dim() - 2))


def _out_channels(layer: nn.Module) -> int | None:
    if isinstance(layer, _ConvNd):
        return layer.out_channels
    return layer.out_features if isinstance(layer, nn.Linear) else None
