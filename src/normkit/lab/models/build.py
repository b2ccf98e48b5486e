"""From the record of a model to the network, with random weights."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from normkit import models
from normkit.errors import NormkitError, OptionError, UnknownName, nearest
from normkit.lab.experiment import Model
from normkit.lab.models.resnet import CifarResNet, WideResNet
from normkit.lab.models.small import MLP, FourLayer, SmallCNN
from normkit.lab.models.stems import fit_channels, fit_stem

STEMS = ("own", "cifar")
CLASSES = ("num_classes", "classes", "n_classes")
CHANNELS = ("in_chans", "in_channels", "in_ch")
# these give further outputs in training, and warn about their slow start, unless told otherwise
WITH_AUXILIARY = ("googlenet", "inception_v3")

# The networks that no library has in the form of the papers. Each is built from the number of
# classes and the shape of an image, takes its further arguments as options, and has torch's own
# batch norms: whatever a variant wants instead is put there later.
NATIVE: dict[str, Callable[..., nn.Module]] = {
    "four_layer": FourLayer,
    "mlp": MLP,
    "resnet": CifarResNet,
    **{f"resnet{depth}": partial(CifarResNet, depth=depth) for depth in (20, 32, 44, 56, 110)},
    "small_cnn": SmallCNN,
    "wrn": WideResNet,
}


def build(spec: Model, classes: int, shape: tuple[int, int, int]) -> nn.Module:
    """The network of a record for images of a shape (channels, height, width), on the CPU.

    native:NAME, timm:NAME, torchvision:NAME or package.module:callable. A callable gets the
    number of classes and of channels if it has arguments of the usual names, ``num_classes`` and
    ``in_chans`` and their like; the record's options go to the constructor and come first.

    >>> from normkit.lab.experiment import Model
    >>> model = build(Model("native:resnet20"), classes=10, shape=(3, 32, 32))
    >>> sum(p.numel() for p in model.parameters())
    269722
    """
    if spec.stem not in STEMS:
        raise OptionError(f"model.stem is {spec.stem!r}. {nearest(str(spec.stem), STEMS)}")
    library, _, name = spec.name.partition(":")
    options = dict(spec.options)
    if library == "native":
        if spec.stem != "own":
            raise OptionError(f"{spec.name} is made for small images already. Try stem='own'.")
        return _build_native(name, classes, shape, options)
    if library == "timm":
        defaults: dict[str, Any] = {"num_classes": classes, "in_chans": shape[0]}
    elif library == "torchvision":
        defaults = {"num_classes": classes}
        if name in WITH_AUXILIARY:
            defaults |= {"aux_logits": False, "init_weights": True}
    else:
        defaults = _arguments_by_name(spec.name, classes, shape[0])
    model = models.build(spec.name, **{**defaults, **options})
    if library not in ("timm", "torchvision"):
        model = copy.deepcopy(model)  # the reference may be to one object, which runs would share
    if spec.stem == "cifar":
        fit_stem(model, spec.name)
    if library == "torchvision":
        fit_channels(model, shape[0], spec.name)
    return model


def _build_native(
    name: str, classes: int, shape: tuple[int, int, int], options: dict[str, Any]
) -> nn.Module:
    if name not in NATIVE:
        raise UnknownName(f"There is no model native:{name}. {nearest(name, NATIVE)}")
    network = NATIVE[name]
    fixed = {"classes", "shape", *(network.keywords if isinstance(network, partial) else ())}
    parameters = inspect.signature(network).parameters
    allowed = [option for option in parameters if option not in fixed]
    for option, value in options.items():
        if option not in allowed:
            hint = nearest(option, allowed) if allowed else "It has none."
            raise OptionError(f"native:{name} has no option {option!r}. {hint}")
        # every option that is a whole number counts layers or channels
        whole = isinstance(value, int) and not isinstance(value, bool)
        if parameters[option].annotation == "int" and not (whole and value > 0):
            raise OptionError(
                f"native:{name} expects {option} to be a positive integer, got {value!r}."
            )
    try:
        return network(classes, shape, **options)
    except NormkitError as error:
        raise type(error)(f"native:{name}: {error}") from error


def _arguments_by_name(reference: str, classes: int, channels: int) -> dict[str, Any]:
    """What a callable wants to know of the data, by the names of its arguments."""
    module, _, name = reference.partition(":")
    try:
        parameters = inspect.signature(models.callable_of(module, name)).parameters
    except (NormkitError, ValueError):  # models.build says what is wrong with the reference
        return {}
    wanted = ((CLASSES, classes), (CHANNELS, channels))
    return {name: value for names, value in wanted for name in names if name in parameters}
