"""The networks that no library has in the form of the papers, by name.

Each is built from the number of classes and the shape of an image, takes its further arguments as
options, and has torch's own batch norms: whatever a variant wants instead is put there later.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from normkit.errors import NormkitError, OptionError, UnknownName, nearest
from normkit.lab.models.four_layer import FourLayer
from normkit.lab.models.mlp import MLP
from normkit.lab.models.resnet import ResNet
from normkit.lab.models.small_cnn import SmallCNN
from normkit.lab.models.wrn import WideResNet

Shape = tuple[int, int, int]  # channels, height, width

NATIVE: dict[str, Callable[..., nn.Module]] = {
    "four_layer": FourLayer,
    "mlp": MLP,
    "resnet": ResNet,
    **{f"resnet{depth}": partial(ResNet, depth=depth) for depth in (20, 32, 44, 56, 110)},
    "small_cnn": SmallCNN,
    "wrn": WideResNet,
}


def build_native(name: str, classes: int, shape: Shape, options: dict[str, Any]) -> nn.Module:
    """A network of the table, or an error that suggests the nearest name or option."""
    if name not in NATIVE:
        raise UnknownName(f"There is no model native:{name}. {nearest(name, NATIVE)}")
    made = NATIVE[name]
    fixed = {"classes", "shape", *(made.keywords if isinstance(made, partial) else ())}
    known = [option for option in inspect.signature(made).parameters if option not in fixed]
    for option in options:
        if option not in known:
            hint = nearest(option, known) if known else "It has none."
            raise OptionError(f"native:{name} has no option {option!r}. {hint}")
    try:
        return made(classes, shape, **options)
    except NormkitError as error:
        raise type(error)(f"native:{name}: {error}") from error
