"""From the record of a model to the network, with random weights, fitted to the images."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

from torch import nn

from normkit import models
from normkit.errors import NormkitError, OptionError, UnknownName, nearest
from normkit.lab.experiment import Model
from normkit.lab.experiment.rules import CHOICES
from normkit.lab.models.darts import DartsNetwork, SearchNetwork
from normkit.lab.models.deeplab import DeepLabV3
from normkit.lab.models.detectors import faster_rcnn, mask_rcnn
from normkit.lab.models.networks import MLP, CifarResNet, FourLayer, ResNet12, SmallCNN, WideResNet
from normkit.lab.own_code import find, own_error_words, source_file

CLASSES = ("num_classes", "classes", "n_classes")
CHANNELS = ("in_chans", "in_channels", "in_ch")
# these give further outputs in training, and warn about their slow start, unless told otherwise
WITH_AUXILIARY = ("googlenet", "inception_v3")

# The networks that no library has in the form of the papers. Each is built from the number of
# classes and the shape of an image, takes its further arguments as options, and has torch's own
# batch norms: whatever a variant wants instead is put there later.
NATIVE: dict[str, Callable[..., nn.Module]] = {
    "darts": DartsNetwork,
    "darts_search": SearchNetwork,
    "deeplabv3": DeepLabV3,
    "faster_rcnn": faster_rcnn,
    "four_layer": FourLayer,
    "mask_rcnn": mask_rcnn,
    "mlp": MLP,
    "resnet": CifarResNet,
    "resnet18": partial(CifarResNet, depth=18, width=64, stages=4, shortcut="B"),
    **{f"resnet{depth}": partial(CifarResNet, depth=depth) for depth in (20, 32, 44, 56, 110)},
    "resnet12": ResNet12,
    "small_cnn": SmallCNN,
    "wrn": WideResNet,
}


def build(spec: Model, classes: int, shape: tuple[int, ...], *, folder: str = "") -> nn.Module:
    """The network of a record for images of a shape (channels, height, width), on the CPU.

    native:NAME, timm:NAME, torchvision:NAME or package.module:callable. A callable gets the
    number of classes and of channels if it has arguments of the usual names, ``num_classes`` and
    ``in_chans`` and their like; the record's options go to the constructor and come first.
    file.py:callable is looked for in ``folder``, then in the working directory.

    >>> from normkit.lab.experiment import Model
    >>> model = build(Model("native:resnet20"), classes=10, shape=(3, 32, 32))
    >>> sum(p.numel() for p in model.parameters())
    269722
    """
    if spec.stem not in CHOICES["model.stem"]:
        hint = nearest(str(spec.stem), CHOICES["model.stem"])
        raise OptionError(f"model.stem is {spec.stem!r}. {hint}")
    library, _, name = spec.name.partition(":")
    options = dict(spec.options)
    if library == "native":
        if spec.stem != "own":
            raise OptionError(f"{spec.name} is made for small images already. Try stem='own'.")
        return _build_native(name, classes, shape, options)
    if library == "timm":
        defaults: dict[str, Any] | None = {"num_classes": classes, "in_chans": shape[0]}
    elif library == "torchvision":
        defaults = {"num_classes": classes}
        if name in WITH_AUXILIARY:
            defaults |= {"aux_logits": False, "init_weights": True}
    elif library.endswith(".py") or source_file(library, folder):
        model = _build_own(spec, classes, shape[0], folder)
        defaults = None
    else:
        defaults = _arguments_by_name(spec.name, classes, shape[0])
    if defaults is not None:
        model = models.build(spec.name, **{**defaults, **options})
    if library not in ("timm", "torchvision"):
        model = copy.deepcopy(model)  # the reference may be to one object, which runs would share
    if spec.stem == "cifar":
        fit_stem(model, spec.name)
    if library == "torchvision":
        fit_channels(model, shape[0], spec.name)
    return model


def _build_own(spec: Model, classes: int, channels: int, folder: str) -> nn.Module:
    """Of the author's own file: what a class or function there makes, or an object."""
    make = find(spec.name, folder)
    if isinstance(make, nn.Module):
        return make
    wanted = _wanted_arguments(make, classes, channels)
    try:
        model = make(**{**wanted, **spec.options})
    except NormkitError:
        raise
    except (Exception, SystemExit) as error:
        raise OptionError(f"{spec.name} could not be built: {own_error_words(error)}.") from error
    if not isinstance(model, nn.Module):
        raise OptionError(
            f"{spec.name} gave a {type(model).__name__}, expected a torch.nn.Module. "
            "Try a function that returns the model."
        )
    return model


def _build_native(
    name: str, classes: int, shape: tuple[int, ...], options: dict[str, Any]
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
        return _wanted_arguments(models.callable_of(module, name), classes, channels)
    except NormkitError:  # models.build says what is wrong with the reference
        return {}


def _wanted_arguments(make: Any, classes: int, channels: int) -> dict[str, Any]:
    try:
        parameters = inspect.signature(make).parameters
    except (TypeError, ValueError):
        return {}
    wanted = ((CLASSES, classes), (CHANNELS, channels))
    return {name: value for names, value in wanted for name in names if name in parameters}


# ------------------------------------------------------------------ networks made for ImageNet
# Classes of the libraries are known by their names, so that none of them has to be installed.


def fit_channels(model: nn.Module, channels: int, reference: str) -> None:
    """Let the first convolution take images of so many channels."""
    for path, conv in model.named_modules():
        if isinstance(conv, nn.Conv2d):
            if conv.in_channels != channels:
                model.set_submodule(path, _conv(conv, in_channels=channels))
            return
    raise OptionError(
        f"{reference} has no convolution that could take images of {channels} channels."
    )


def fit_stem(model: nn.Module, reference: str) -> None:
    """Let a network for 224×224 pixels work at the resolution of CIFAR, as the papers do."""
    name = type(model).__name__
    if name not in CIFAR_STEMS:
        raise OptionError(
            f'{reference} is a {name}, and there is no stem="cifar" for it, only for '
            f'{", ".join(CIFAR_STEMS)}. Try stem="own".'
        )
    try:
        CIFAR_STEMS[name](model)
    except (AttributeError, IndexError, TypeError, StopIteration) as error:
        raise OptionError(
            f'{reference} is a {name}, but not of the form that stem="cifar" expects: {error}. '
            'Try stem="own".'
        ) from error


def _resnet(model: Any) -> None:
    """ResNet, ResNeXt, Res2Net: 3×3 with stride 1 and no pooling (revisiting-bn, UBN)."""
    if not isinstance(model.conv1, nn.Conv2d) or not isinstance(model.maxpool, nn.MaxPool2d):
        raise TypeError("its stem is not one convolution and a pooling layer")
    model.conv1 = _conv(model.conv1, kernel_size=3, stride=1, padding=1)
    model.maxpool = nn.Identity()


def _densenet(model: Any) -> None:
    model.features.conv0 = _conv(model.features.conv0, kernel_size=3, stride=1, padding=1)
    model.features.pool0 = nn.Identity()


def _mobilenet_v2(model: Any) -> None:
    """The first convolution and the second and third stage get stride 1 (revisiting-bn)."""
    strided = (m for m in _convolutions(model) if m.stride == (2, 2))
    for conv in list(islice(strided, 3)):
        conv.stride = (1, 1)


def _shufflenet_v2(model: Any) -> None:
    model.conv1[0].stride = (1, 1)
    model.maxpool = nn.Identity()


def _repvgg(model: Any) -> None:
    """Stages 0 and 1, the stem and the first list of blocks, get stride 1 (revisiting-bn).

    A RepVGG that was built with these strides would have a third branch, a norm alone, in the
    first block of stage 1; the converted one has the two that it was born with.
    """
    if type(model.stem).__name__ != "RepVggBlock":
        raise TypeError("of the networks of this class only RepVGG is known")
    for part in (model.stem, model.stages[0]):
        for conv in _convolutions(part):
            conv.stride = (1, 1)


def _vgg(model: Any) -> None:
    """The classifier takes the one position that is left of 32×32 pixels, not 7×7 copies of it."""
    first = model.classifier[0]
    last = [m.out_channels for m in _convolutions(model.features)][-1]
    model.avgpool = nn.AdaptiveAvgPool2d(1)
    model.classifier[0] = nn.Linear(last, first.out_features)
    nn.init.normal_(model.classifier[0].weight, 0, 0.01)  # as torchvision starts the others
    nn.init.zeros_(model.classifier[0].bias)


def _inception_v4(model: Any) -> None:
    """The stem keeps the size of the maps: stride 1 and padding for all its 3×3 windows."""
    for part in model.features[:6]:
        for module in part.modules():
            if isinstance(module, nn.Conv2d) and module.kernel_size == (3, 3):
                module.stride, module.padding = (1, 1), (1, 1)
            elif isinstance(module, nn.MaxPool2d):
                module.stride, module.padding = 1, 1


CIFAR_STEMS: dict[str, Callable[[Any], None]] = {
    "ByobNet": _repvgg,
    "DenseNet": _densenet,
    "InceptionV4": _inception_v4,
    "MobileNetV2": _mobilenet_v2,
    "ResNet": _resnet,
    "ShuffleNetV2": _shufflenet_v2,
    "VGG": _vgg,
}


def _convolutions(model: nn.Module) -> Iterator[nn.Conv2d]:
    return (module for module in model.modules() if isinstance(module, nn.Conv2d))


def _conv(like: nn.Conv2d, **changes: Any) -> nn.Conv2d:
    """A new convolution with some arguments changed, started as the ResNets start theirs."""
    arguments: dict[str, Any] = {
        "in_channels": like.in_channels,
        "kernel_size": like.kernel_size,
        "stride": like.stride,
        "padding": like.padding,
        **changes,
    }
    conv = nn.Conv2d(out_channels=like.out_channels, bias=like.bias is not None, **arguments)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return conv
