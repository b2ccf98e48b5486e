"""native:resnet20 … resnet110, the ResNets for CIFAR with basic blocks."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from normkit.errors import OptionError, nearest
from normkit.lab.models.numbers import positive

SHORTCUTS = ("A", "B")


class ResNet(nn.Module):
    """A 3×3 stem and three stages of basic blocks with 16, 32 and 64 channels: 6n + 2 layers.

    He et al. 2016, section 4.2. ``shortcut`` "A" passes every second pixel on and fills new
    channels with zeros, without parameters, as there; "B" is a 1×1 convolution with a norm.
    ``width`` is the number of channels of the first stage. ``zero_init_residual`` lets the last
    norm of each block start at zero.
    """

    def __init__(
        self,
        classes: int,
        shape: tuple[int, int, int],
        *,
        depth: int = 20,
        width: int = 16,
        shortcut: str = "A",
        zero_init_residual: bool = False,
    ) -> None:
        super().__init__()
        if positive("depth", depth) < 8 or (depth - 2) % 6:
            near = 6 * max(1, round((depth - 2) / 6)) + 2
            raise OptionError(f"depth is to be 6n + 2, such as {near}, got {depth}.")
        if shortcut not in SHORTCUTS:
            raise OptionError(f"shortcut={shortcut!r}. {nearest(str(shortcut), SHORTCUTS)}")
        blocks = (depth - 2) // 6
        self.conv1 = nn.Conv2d(shape[0], positive("width", width), 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = _stage(width, width, blocks, 1, shortcut)
        self.layer2 = _stage(width, 2 * width, blocks, 2, shortcut)
        self.layer3 = _stage(2 * width, 4 * width, blocks, 2, shortcut)
        self.fc = nn.Linear(4 * width, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif zero_init_residual and isinstance(module, BasicBlock):
                nn.init.zeros_(module.bn2.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
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
        self.shortcut: nn.Module = nn.Identity()
        if inputs != outputs and shortcut == "A":
            self.shortcut = Subsample(outputs - inputs, stride)
        elif inputs != outputs or stride > 1:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        z: Tensor = self.relu(y + self.shortcut(x))
        return z


class Subsample(nn.Module):
    """Every ``stride``-th pixel, and ``more`` channels of zeros."""

    def __init__(self, more: int, stride: int) -> None:
        super().__init__()
        self.more, self.stride = more, stride

    def forward(self, x: Tensor) -> Tensor:
        kept = x[:, :, :: self.stride, :: self.stride]
        return F.pad(kept, (0, 0, 0, 0, self.more // 2, self.more - self.more // 2))


def _stage(inputs: int, outputs: int, blocks: int, stride: int, shortcut: str) -> nn.Sequential:
    first = BasicBlock(inputs, outputs, stride, shortcut)
    return nn.Sequential(
        first, *(BasicBlock(outputs, outputs, 1, shortcut) for _ in range(blocks - 1))
    )
