"""The activations that ride on a norm's pass: what each is, its gradient, and how to tell it.

Kernels know them by number (``engine/triton/activations.py`` has the same formulas). A gradient is
made of what went into the activation, which the pass makes again: nothing is kept for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normkit.errors import OptionError, nearest

Gradient = Callable[[Tensor, Tensor], Tensor]


class Activation(NamedTuple):
    """A function, the gradient before it from the one after it and what went in, its module."""

    number: int
    function: Callable[[Tensor], Tensor]
    gradient: Gradient
    module: Callable[[], nn.Module]


def _silu(grad: Tensor, pre: Tensor) -> Tensor:
    s = torch.sigmoid(pre)
    return grad * s * (1 + pre * (1 - s))


def _sigmoid(grad: Tensor, pre: Tensor) -> Tensor:
    s = torch.sigmoid(pre)
    return grad * s * (1 - s)


def _hardswish(grad: Tensor, pre: Tensor) -> Tensor:
    inner = torch.where(pre < 3, grad * (pre / 3 + 0.5), grad)
    return torch.where(pre > -3, inner, 0)


def _gelu(grad: Tensor, pre: Tensor) -> Tensor:
    below = 0.5 * (1 + torch.erf(pre * math.sqrt(0.5)))
    return grad * (below + pre * torch.exp(-0.5 * pre * pre) * math.sqrt(0.5 / math.pi))


def _gelu_tanh(grad: Tensor, pre: Tensor) -> Tensor:
    factor = math.sqrt(2 / math.pi)
    t = torch.tanh(factor * (pre + 0.044715 * pre**3))
    slope = factor * (1 + 3 * 0.044715 * pre * pre)
    return grad * (0.5 * (1 + t) + 0.5 * pre * (1 - t * t) * slope)


def _mish(grad: Tensor, pre: Tensor) -> Tensor:
    t = torch.tanh(F.softplus(pre))
    return grad * (t + pre * (1 - t * t) * torch.sigmoid(pre))


def _elu(grad: Tensor, pre: Tensor) -> Tensor:
    return torch.where(pre > 0, grad, grad * torch.exp(pre.clamp(max=0)))


def _relu(grad: Tensor, pre: Tensor) -> Tensor:
    return torch.where(pre <= 0, 0, grad)  # what is not a number lets it through, as in torch


def _relu6(grad: Tensor, pre: Tensor) -> Tensor:
    return torch.where((pre <= 0) | (pre >= 6), 0, grad)


def _leaky(slope: float) -> tuple[Callable[[Tensor], Tensor], Gradient, Callable[[], nn.Module]]:
    return (
        partial(F.leaky_relu, negative_slope=slope),
        lambda grad, pre: torch.where(pre > 0, grad, slope * grad),
        partial(nn.LeakyReLU, slope),
    )


KNOWN = {
    "relu": Activation(1, F.relu, _relu, nn.ReLU),
    "silu": Activation(2, F.silu, _silu, nn.SiLU),
    "relu6": Activation(3, F.relu6, _relu6, nn.ReLU6),
    "hardswish": Activation(4, F.hardswish, _hardswish, nn.Hardswish),
    "gelu": Activation(5, F.gelu, _gelu, nn.GELU),
    "gelu_tanh": Activation(
        6, partial(F.gelu, approximate="tanh"), _gelu_tanh, partial(nn.GELU, "tanh")
    ),
    "sigmoid": Activation(7, torch.sigmoid, _sigmoid, nn.Sigmoid),
    "elu": Activation(8, F.elu, _elu, nn.ELU),
    "mish": Activation(9, F.mish, _mish, nn.Mish),
    "leaky_relu": Activation(10, *_leaky(0.01)),
    "leaky_relu_0.1": Activation(11, *_leaky(0.1)),
    "leaky_relu_0.2": Activation(12, *_leaky(0.2)),
}
NAMES = ("none", *KNOWN)
NUMBERS = {"none": 0, **{name: known.number for name, known in KNOWN.items()}}
# whose gradient takes the result as well as what went in
BY_RESULT = frozenset({"none", "relu", "relu6", "leaky_relu", "leaky_relu_0.1", "leaky_relu_0.2"})


def check_name(activation: str) -> None:
    if activation not in NAMES:
        hint = nearest(str(activation), NAMES)
        raise OptionError(f"Unknown activation {activation!r}. {hint}")


def activated(y: Tensor, activation: str) -> Tensor:
    """activation(y), out of place."""
    return y if activation == "none" else KNOWN[activation].function(y)


def module_of(activation: str) -> nn.Module:
    """A module of torch for a name."""
    check_name(activation)
    return nn.Identity() if activation == "none" else KNOWN[activation].module()


def name_of_module(module: Any) -> str | None:
    """The name of what a module of torch does; None if it is another, or has other options."""
    kind = type(module)
    if kind is nn.Identity:
        return "none"
    if kind is nn.LeakyReLU:
        return _leaky_name(module.negative_slope)
    if kind is nn.GELU:
        return {"none": "gelu", "tanh": "gelu_tanh"}.get(module.approximate)
    if kind is nn.ELU:
        return "elu" if module.alpha == 1 else None
    return next((name for name, known in KNOWN.items() if known.module is kind), None)


# functions and methods that are the same whatever is given beside ``inplace``
_FUNCTIONS: dict[Any, str] = {
    **dict.fromkeys((F.relu, torch.relu, torch.relu_, F.relu_, "relu", "relu_"), "relu"),
    **dict.fromkeys((F.sigmoid, torch.sigmoid, torch.sigmoid_, "sigmoid", "sigmoid_"), "sigmoid"),
    F.silu: "silu",
    F.relu6: "relu6",
    F.hardswish: "hardswish",
    F.mish: "mish",
}


def name_of_call(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """The name of what a call of a function or method does; its first argument is the tensor."""
    given = {k: v for k, v in kwargs.items() if k not in ("inplace", "input")}
    rest = args[1:]
    if target in _FUNCTIONS:
        return None if given else _FUNCTIONS[target]
    if target is F.leaky_relu:
        return _leaky_name(given.get("negative_slope", rest[0] if rest else 0.01))
    if target is F.elu:
        return "elu" if given.get("alpha", rest[0] if rest else 1.0) == 1 else None
    if target is F.gelu:
        return {"none": "gelu", "tanh": "gelu_tanh"}.get(given.get("approximate", "none"))
    return None


def _leaky_name(slope: Any) -> str | None:
    return {0.01: "leaky_relu", 0.1: "leaky_relu_0.1", 0.2: "leaky_relu_0.2"}.get(slope)
