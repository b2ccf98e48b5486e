"""Networks that no library has in the form of the papers: native:resnet12, native:resnet18,
native:resnet20 … resnet110, native:wrn, native:small_cnn, native:four_layer and native:mlp.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from normkit.errors import OptionError, nearest

SHORTCUTS = ("A", "B")


class CifarResNet(nn.Module):
    """A 3×3 stem and three stages of basic blocks with 16, 32 and 64 channels: 6n + 2 layers.

    He et al. 2016, section 4.2. ``shortcut`` "A" passes every second pixel on and fills new
    channels with zeros, without parameters, as there; "B" is a 1×1 convolution with a norm.
    ``width`` is the number of channels of the first stage. With ``bottleneck`` blocks have three
    convolutions and four times the channels outside: 9n + 2 layers (He et al. 2016b, section 4).
    Four ``stages`` from 64 channels on with shortcuts "B" are the ResNet-18 that papers train on
    CIFAR: torchvision's, without its pooling and with a 3×3 stem.
    ``zero_init_residual`` lets the last norm of each block start at zero.
    """

    def __init__(
        self,
        classes: int,
        shape: tuple[int, int, int],
        *,
        depth: int = 20,
        width: int = 16,
        shortcut: str = "A",
        stages: int = 3,
        bottleneck: bool = False,
        zero_init_residual: bool = False,
    ) -> None:
        super().__init__()
        layers = (3 if bottleneck else 2) * stages  # for one block more in each stage
        if depth < layers + 2 or (depth - 2) % layers:
            near = layers * max(1, round((depth - 2) / layers)) + 2
            raise OptionError(f"expected depth = {layers}n + 2, such as {near}, got {depth}.")
        if shortcut not in SHORTCUTS:
            raise OptionError(f"shortcut={shortcut!r}. {nearest(str(shortcut), SHORTCUTS)}")
        blocks = (depth - 2) // layers
        block, out = (BottleneckBlock, 4 * width) if bottleneck else (BasicBlock, width)
        self.conv1 = nn.Conv2d(shape[0], width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.stages = [f"layer{i + 1}" for i in range(stages)]
        inputs = width
        for i, name in enumerate(self.stages):
            outputs = out * 2**i
            stage = _stage(block, inputs, outputs, blocks, 1 if i == 0 else 2, shortcut)
            self.add_module(name, stage)
            inputs = outputs
        self.fc = nn.Linear(inputs, classes)
        _start_by_fan_out(self)
        if zero_init_residual:
            for module in self.modules():
                if isinstance(module, BottleneckBlock):
                    nn.init.zeros_(module.bn3.weight)
                elif isinstance(module, BasicBlock):
                    nn.init.zeros_(module.bn2.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        for name in self.stages:
            x = self.get_submodule(name)(x)
        y: Tensor = self.fc(x.mean((2, 3)))
        return y


class BasicBlock(nn.Module):
    """Two 3×3 convolutions beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int, shortcut: str) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = _shortcut(inputs, outputs, stride, shortcut)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        z: Tensor = self.relu(y + self.shortcut(x))
        return z


class BottleneckBlock(nn.Module):
    """1×1, 3×3 and 1×1 convolutions, a quarter of the channels inside, beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int, shortcut: str) -> None:
        super().__init__()
        inner = outputs // 4
        self.conv1 = nn.Conv2d(inputs, inner, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(inner)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(inner, inner, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(inner)
        self.conv3 = nn.Conv2d(inner, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.shortcut = _shortcut(inputs, outputs, stride, shortcut)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        z: Tensor = self.relu(y + self.shortcut(x))
        return z


def _shortcut(inputs: int, outputs: int, stride: int, kind: str) -> nn.Module:
    if inputs != outputs and kind == "A":
        return Subsample(outputs - inputs, stride)
    if inputs == outputs and stride == 1:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))


class Subsample(nn.Module):
    """Every ``stride``-th pixel, and ``more`` channels of zeros."""

    def __init__(self, more: int, stride: int) -> None:
        super().__init__()
        self.more, self.stride = more, stride

    def forward(self, x: Tensor) -> Tensor:
        kept = x[:, :, :: self.stride, :: self.stride]
        return F.pad(kept, (0, 0, 0, 0, self.more // 2, self.more - self.more // 2))


class WideResNet(nn.Module):
    """A 3×3 stem of 16 channels and three stages of blocks with 16, 32 and 64 times ``width``
    channels: 6n + 4 layers, norm and ReLU before each convolution.

    Zagoruyko & Komodakis 2016. WRN-10-2 is ``depth=10, width=2``, as in bgn's adversarial runs;
    the default is WRN-28-10. ``dropout`` stands between the convolutions of a block.
    """

    def __init__(
        self,
        classes: int,
        shape: tuple[int, int, int],
        *,
        depth: int = 28,
        width: int = 10,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if depth < 10 or (depth - 4) % 6:
            near = 6 * max(1, round((depth - 4) / 6)) + 4
            raise OptionError(f"expected depth = 6n + 4, such as {near}, got {depth}.")
        blocks = (depth - 4) // 6
        sizes = [16 * width, 32 * width, 64 * width]
        self.conv1 = nn.Conv2d(shape[0], 16, 3, padding=1, bias=False)
        self.layer1 = _stage(WideBlock, 16, sizes[0], blocks, 1, dropout)
        self.layer2 = _stage(WideBlock, sizes[0], sizes[1], blocks, 2, dropout)
        self.layer3 = _stage(WideBlock, sizes[1], sizes[2], blocks, 2, dropout)
        self.bn1 = nn.BatchNorm2d(sizes[2])
        self.relu = nn.ReLU(inplace=True)
        self.fc = nn.Linear(sizes[2], classes)
        _start_by_fan_out(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer3(self.layer2(self.layer1(self.conv1(x))))
        x = self.relu(self.bn1(x))
        y: Tensor = self.fc(x.mean((2, 3)))
        return y


class WideBlock(nn.Module):
    """Norm, ReLU, convolution, twice; where the size changes, the shortcut starts after the first
    ReLU."""

    def __init__(self, inputs: int, outputs: int, stride: int, dropout: float) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.relu = nn.ReLU()  # not in place: the shortcut may need what came in
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.drop = nn.Dropout(dropout)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        changes = inputs != outputs or stride > 1
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if changes else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(x))
        passed = x if self.shortcut is None else self.shortcut(y)
        y = self.drop(self.relu(self.bn2(self.conv1(y))))
        z: Tensor = self.conv2(y) + passed
        return z


class ResNet12(nn.Module):
    """Four blocks of three 3×3 convolutions beside a 1×1 one, each pooled to half the size.

    Oreshkin et al. 2018; 64, 128, 256 and 512 channels for the usual ``width``.
    """

    def __init__(self, classes: int, shape: tuple[int, ...], *, width: int = 64) -> None:
        super().__init__()
        channels = [shape[0], width, 2 * width, 4 * width, 8 * width]
        self.blocks = nn.Sequential(*(PooledBlock(channels[i], channels[i + 1]) for i in range(4)))
        self.fc = nn.Linear(channels[-1], classes)
        _start_by_fan_out(self)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(self.blocks(x).mean((2, 3)))
        return y


class PooledBlock(nn.Module):
    """Three convolutions beside a shortcut, then the largest of 2×2 positions."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for number in range(3):
            before = outputs if number else inputs
            layers += [
                nn.Conv2d(before, outputs, 3, padding=1, bias=False),
                nn.BatchNorm2d(outputs),
            ]
            layers += [nn.ReLU(inplace=True)] * (number < 2)
        self.layers = nn.Sequential(*layers)
        self.shortcut = nn.Sequential(
            nn.Conv2d(inputs, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.layers(x) + self.shortcut(x))
        return F.max_pool2d(y, 2) if min(y.shape[2:]) > 1 else y


class SmallCNN(nn.Module):
    """Three 3×3 convolutions with stride 1, 2, 2, each with a norm and ReLU; then a mean and a
    linear output: it trains in seconds on a CPU.

    Made for the 8×8 digits, where its last maps have 2×2 positions: with two samples a worker a
    batch norm there sees eight values a channel, so the noise of small batches shows as it does
    in the last stages of large networks. ``width`` is the number of channels of the first layer;
    each further one has twice as many.
    """

    def __init__(self, classes: int, shape: tuple[int, int, int], *, width: int = 16) -> None:
        super().__init__()
        self.conv1 = _conv_layer(shape[0], width)
        self.conv2 = _conv_layer(width, 2 * width, stride=2)
        self.conv3 = _conv_layer(2 * width, 4 * width, stride=2)
        self.fc = nn.Linear(4 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv3(self.conv2(self.conv1(x)))
        y: Tensor = self.fc(x.mean((2, 3)))
        return y


class FourLayer(nn.Module):
    """Four 3×3 convolutions of 32 channels, each with a norm, ReLU and 2×2 average pooling, then a
    mean over what is left and a linear output: figure 5 and section 6.1.3 of ws-bcn.

    The size of the kernels is not printed there; 3×3 is the usual one.
    """

    def __init__(
        self, classes: int, shape: tuple[int, int, int], *, width: int = 32, depth: int = 4
    ) -> None:
        super().__init__()
        channels = [shape[0], *[width] * depth]
        # images smaller than 16×16 keep a position
        self.layers = nn.Sequential(
            *(
                _conv_layer(before, after, pool=nn.AvgPool2d(2, ceil_mode=True))
                for before, after in pairwise(channels)
            )
        )
        self.fc = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(self.layers(x).mean((2, 3)))
        return y


class MLP(nn.Module):
    """``depth`` times Linear, BatchNorm1d, ReLU with ``width`` units, and a linear output.

    The "20-layer MLP" on which estimation-shift is measured, read as 20 normalized layers before
    the output. ``norm=False`` leaves the norms out, as in the comparison without them.
    """

    def __init__(
        self,
        classes: int,
        shape: tuple[int, int, int],
        *,
        depth: int = 20,
        width: int = 128,
        norm: bool = True,
    ) -> None:
        super().__init__()
        self.layers = nn.Sequential()
        for before, after in pairwise([math.prod(shape), *[width] * depth]):
            parts: OrderedDict[str, nn.Module] = OrderedDict(linear=nn.Linear(before, after))
            if norm:
                parts["norm"] = nn.BatchNorm1d(after)
            parts["act"] = nn.ReLU()
            self.layers.append(nn.Sequential(parts))
        self.fc = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(self.layers(x.flatten(1)))
        return y


def _conv_layer(
    inputs: int, outputs: int, stride: int = 1, pool: nn.Module | None = None
) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    parts: OrderedDict[str, nn.Module] = OrderedDict(
        conv=conv, norm=nn.BatchNorm2d(outputs), act=nn.ReLU(inplace=True)
    )
    if pool is not None:
        parts["pool"] = pool
    return nn.Sequential(parts)


def _stage(
    block: Callable[..., nn.Module],
    inputs: int,
    outputs: int,
    count: int,
    stride: int,
    *further: Any,
) -> nn.Sequential:
    """Blocks of which the first changes the number of channels and the resolution."""
    rest = (block(outputs, outputs, 1, *further) for _ in range(count - 1))
    return nn.Sequential(block(inputs, outputs, stride, *further), *rest)


def _start_by_fan_out(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
