"""Layers whose weight is normalized before use."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from normkit.inspection.facts import library_of
from normkit.layers.weight import WeightNormalizer

# of classes that do it alone; first match wins
CLASSES = (
    (r"ScaledStdConv", "scaled_ws"),
    (r"StdConv|Conv\w*WS|WSConv|ConvAWS|WeightStandardized", "ws"),
)
# of what computes the weight; torch.nn.utils has an old form, which is a hook, and a new one
COMPUTED = {
    "WeightNorm": "wn",
    "_WeightNorm": "wn",
    "SpectralNorm": "spectral",
    "_SpectralNorm": "spectral",
}


@dataclass(frozen=True, eq=False)
class WeightSite:
    """A convolution or linear layer with a normalized weight."""

    path: str
    module: nn.Module
    kind: str  # "ws", "wn" or "cwn" of the catalog, "scaled_ws" or "spectral"
    library: str
    class_name: str


def weights_of(model: nn.Module) -> tuple[WeightSite, ...]:
    """Every layer with a normalized weight: by its class, a parametrization, or a hook."""
    found = ((path, module, _kind(module)) for path, module in model.named_modules())
    return tuple(
        WeightSite(path, module, kind, library_of(module), type(module).__name__)
        for path, module, kind in found
        if kind is not None
    )


def _kind(module: nn.Module) -> str | None:
    for step in _steps(module):
        if isinstance(step, WeightNormalizer):
            return step.card.name
        if (kind := COMPUTED.get(type(step).__name__)) is not None:
            return kind
    if not isinstance(getattr(module, "weight", None), nn.Parameter):
        return None
    names = [base.__name__ for base in type(module).__mro__]
    return next((kind for mark, kind in CLASSES for n in names if re.search(mark, n)), None)


def _steps(module: nn.Module) -> list[Any]:
    """What computes the tensors of a module."""
    steps: list[Any] = list(module._forward_pre_hooks.values())
    if is_parametrized(module):
        for computed in module.parametrizations.values():  # type: ignore[operator]
            steps += computed
    return steps
