"""Small networks: native:small_cnn, native:four_layer and native:mlp."""

from __future__ import annotations

import math
from collections import OrderedDict
from itertools import pairwise

from torch import Tensor, nn


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
