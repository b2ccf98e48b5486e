"""Networks made for ImageNet, fitted to images of another size or number of channels.

Classes of the libraries are known by their names, so that none of them has to be installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from torch import nn

from normkit.errors import OptionError


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
    if name not in STEMS:
        raise OptionError(
            f'{reference} is a {name}, and there is no stem="cifar" for it, only for '
            f'{", ".join(STEMS)}. Try stem="own".'
        )
    try:
        STEMS[name](model)
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


STEMS: dict[str, Callable[[Any], None]] = {
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
