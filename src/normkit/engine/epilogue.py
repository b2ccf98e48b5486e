"""What may follow the affine map in the same pass: + residual, then an activation."""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from normkit.engine.activations import KNOWN, activated, check_name
from normkit.errors import ShapeError


class AffineMap(NamedTuple):
    """activation(scale · (x − center) + shift + residual), with whole tables; None is zero."""

    scale: Tensor
    shift: Tensor | None = None
    center: Tensor | None = None
    residual: Tensor | None = None
    act: str = "none"


def check(x: Tensor, residual: Tensor | None, activation: str) -> None:
    check_name(activation)
    if residual is not None and not isinstance(residual, Tensor):
        raise ShapeError(
            f"The residual must be a tensor of the shape of the input, {tuple(x.shape)}, got "
            f"{type(residual).__name__}."
        )
    if residual is not None and residual.shape != x.shape:
        raise ShapeError(
            f"The residual must have the shape of the input, {tuple(x.shape)}, "
            f"but has {tuple(residual.shape)}. Try residual.expand_as(x) if it is to be repeated."
        )


def followed(residual: Tensor | None, activation: str) -> bool:
    """Whether there is anything to do."""
    return residual is not None or activation != "none"


def epilogue(y: Tensor, residual: Tensor | None, activation: str) -> Tensor:
    """activation(y + residual), out of place."""
    if residual is not None:
        y = y + residual.to(y.dtype)
    return activated(y, activation)


def epilogue_(y: Tensor, residual: Tensor | None, activation: str) -> Tensor:
    """activation(y + residual), written over y."""
    if residual is not None:
        y += residual
    if activation == "relu":
        return y.relu_()
    if activation == "silu":
        return F.silu(y, inplace=True)
    return y if activation == "none" else y.copy_(activated(y, activation))


def followed_by(y: Tensor, residual: Tensor | None, activation: str) -> Tensor:
    """activation(y + residual) for autograd, over y where no backward needs y: nothing is written
    that would have to be fetched from memory again. y is the output of a map, known to nobody."""
    if residual is not None:
        y = y.add_(residual)
    if activation == "relu":
        return y.relu_()  # its backward looks at its result
    return activated(y, activation)  # whose backward looks at what goes in


def before(grad: Tensor, pre: Tensor, activation: str) -> Tensor:
    """The gradient before the activation, from the one after it and what went into it."""
    return KNOWN[activation].gradient(grad, pre)
