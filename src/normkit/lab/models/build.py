"""From the record of a model to the network, with random weights."""

from __future__ import annotations

import copy
import inspect
from typing import Any

from torch import nn

from normkit import models
from normkit.errors import NormkitError, OptionError, nearest
from normkit.lab.experiment import Model
from normkit.lab.models.fitting import fit_channels, fit_stem
from normkit.lab.models.native import build_native

STEMS = ("own", "cifar")
CLASSES = ("num_classes", "classes", "n_classes")
CHANNELS = ("in_chans", "in_channels", "in_ch")
# these give further outputs in training, and warn about their slow start, unless told otherwise
ALONE = {
    name: {"aux_logits": False, "init_weights": True} for name in ("googlenet", "inception_v3")
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
        return build_native(name, classes, shape, options)
    if library == "timm":
        usual: dict[str, Any] = {"num_classes": classes, "in_chans": shape[0]}
    elif library == "torchvision":
        usual = {"num_classes": classes, **ALONE.get(name, {})}
    else:
        usual = _asked_for(spec.name, classes, shape[0])
    model = models.build(spec.name, **{**usual, **options})
    if library not in ("timm", "torchvision"):
        model = copy.deepcopy(model)  # the reference may be to one object, which runs would share
    if spec.stem == "cifar":
        fit_stem(model, spec.name)
    if library == "torchvision":
        fit_channels(model, shape[0], spec.name)
    return model


def _asked_for(reference: str, classes: int, channels: int) -> dict[str, Any]:
    """What a callable wants to know of the data, by the names of its arguments."""
    module, _, name = reference.partition(":")
    try:
        known = inspect.signature(models.callable_of(module, name)).parameters
    except (NormkitError, ValueError):  # models.build says what is wrong with the reference
        return {}
    wanted = ((CLASSES, classes), (CHANNELS, channels))
    return {name: value for names, value in wanted for name in names if name in known}
