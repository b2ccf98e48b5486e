"""What a norm is as a fixed map, and how a convolution or linear layer takes that in."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

from normkit.conversion.edits import count_hooks
from normkit.conversion.sources import read
from normkit.core.precision import widest
from normkit.core.trained import FixedMap
from normkit.inspection import Site, undisturbed
from normkit.inspection.flow import out_channels
from normkit.layers.base import Normalizer
from normkit.layers.weight import WeightNormalizer, normalized_tensors

# classes that pad or cast in their own forward and then use weight and bias like torch.nn
LINEAR_IN_WEIGHT = ("Conv2dSame", "Conv2dSameExport", "Linear")
PLAIN = {"conv1d": nn.Conv1d, "conv2d": nn.Conv2d, "conv3d": nn.Conv3d}


@torch.no_grad()
def fixed_map(site: Site, axes: int | None = None) -> FixedMap | str:
    """The map of a norm, in float64 where the device has it; or why it has none.

    ``axes`` is the number of axes of its input, if known.
    """
    norm = site.norm
    if isinstance(norm, Normalizer):
        return norm.fixed_map(axes)
    if not site.tracked:
        pools = site.card is not None and site.card.pools_samples
        return "it keeps no running statistics" if pools else "its statistics are of the input"
    if norm.training and not site.frozen:
        return "it is in training mode: try model.eval()"
    bn = read(site, 2 if axes is None else axes - 2)
    if isinstance(bn, str):
        return bn
    scale = _wide(bn.weight) * torch.rsqrt(_wide(bn.var) + bn.eps)
    return FixedMap(scale, _wide(bn.bias) - _wide(bn.mean) * scale)


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
    if channels != out_channels(layer):
        return f"{name} gives {out_channels(layer)} channels"
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
    new = (_wide(weight) * by).to(weight.dtype)
    if weight.dim() == 4 and weight.is_contiguous(memory_format=torch.channels_last):
        new = new.contiguous(memory_format=torch.channels_last)
    moved = shift if bias is None else _wide(bias) * scale + shift
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


def _wide(tensor: Tensor) -> Tensor:
    return tensor.detach().to(widest(tensor.device))


# -------------------------------------------------------------------- computed weights


def can_be_plain(layer: nn.Module) -> bool:
    """Whether a layer computes its weight in a way that can be computed once and for all."""
    # a class of its own, in which a parameter goes into what computes the weight
    own = isinstance(layer._parameters.get("weight"), nn.Parameter)
    return bool(normalized_tensors(layer)) or (own and _call(layer) is not None)


def plain_form(layer: nn.Module) -> nn.Module:
    """A layer with a plain weight that computes the same: another one, or a changed copy."""
    if normalized_tensors(layer):
        return WeightNormalizer.fold(copy.deepcopy(layer))
    call = _call(layer)
    if call is None or not isinstance(layer, _ConvNd):
        return layer
    name, (_, weight, bias, stride, padding, dilation, groups) = call
    kind: Any = PLAIN[name]
    plain: nn.Module = kind(
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
    plain.weight = nn.Parameter(weight.detach().clone(), layer.weight.requires_grad)
    if bias is not None:
        plain.bias = nn.Parameter(bias.detach().clone(), bias.requires_grad)
    return plain.train(layer.training)


def _call(layer: Any) -> tuple[str, tuple[Any, ...]] | None:
    """The one call of a convolution that a layer makes of its very input, with all arguments."""
    if not isinstance(layer, _ConvNd) or layer.padding_mode != "zeros" or count_hooks(layer):
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
