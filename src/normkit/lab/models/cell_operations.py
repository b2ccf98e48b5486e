"""The operations on the edges of a cell, and what brings a cell's inputs to its size.

As DARTS has them (Liu, Simonyan & Yang 2019, section 3.1): ReLU, convolution, norm, in this order.
In a search norms have no scale and shift of their own: there, the weights of the operations scale.
"""

from __future__ import annotations

from torch import Tensor, cat, nn
from torch.nn import functional as F

STEM = 3  # times the channels of the first cell


def operation(name: str, channels: int, stride: int, *, searched: bool, affine: bool) -> nn.Module:
    """An operation that keeps the channels; the resolution becomes 1/stride.

    ``searched``: one of many on its edge, where pooling gets a norm, since its outputs would be of
    another size than those of convolutions.
    """
    if name == "skip_connect":
        return nn.Identity() if stride == 1 else HalvedResolution(channels, channels, affine)
    if name.endswith("pool_3x3"):
        pool: nn.Module
        if name.startswith("max"):
            pool = nn.MaxPool2d(3, stride, padding=1)
        else:
            pool = nn.AvgPool2d(3, stride, padding=1, count_include_pad=False)
        return nn.Sequential(pool, nn.BatchNorm2d(channels, affine=affine)) if searched else pool
    kernel = int(name[-1])
    if name.startswith("dil"):
        return nn.Sequential(*_depthwise(channels, kernel, stride, 2, affine))
    first = _depthwise(channels, kernel, stride, 1, affine)
    return nn.Sequential(*first, *_depthwise(channels, kernel, 1, 1, affine))


def _depthwise(
    channels: int, kernel: int, stride: int, dilation: int, affine: bool
) -> list[nn.Module]:
    """ReLU, a convolution of each channel, one across them, and a norm."""
    padding = dilation * (kernel - 1) // 2
    return [
        nn.ReLU(),
        nn.Conv2d(
            channels, channels, kernel, stride, padding, dilation, groups=channels, bias=False
        ),
        nn.Conv2d(channels, channels, 1, bias=False),
        nn.BatchNorm2d(channels, affine=affine),
    ]


class HalvedResolution(nn.Module):
    """Every second pixel by one 1×1 convolution, those between by another, side by side."""

    def __init__(self, inputs: int, outputs: int, affine: bool = True) -> None:
        super().__init__()
        self.relu = nn.ReLU()
        self.conv1 = nn.Conv2d(inputs, outputs // 2, 1, 2, bias=False)
        self.conv2 = nn.Conv2d(inputs, outputs - outputs // 2, 1, 2, bias=False)
        self.norm = nn.BatchNorm2d(outputs, affine=affine)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(x)
        # where the side is odd, the last pixel has none behind it
        between = F.pad(x[:, :, 1:, 1:], (0, x.shape[3] % 2, 0, x.shape[2] % 2))
        y: Tensor = self.norm(cat([self.conv1(x), self.conv2(between)], dim=1))
        return y


def stem(inputs: int, channels: int) -> nn.Sequential:
    """What stands before the first cell, for the channels of that cell."""
    return nn.Sequential(
        nn.Conv2d(inputs, STEM * channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(STEM * channels),
    )


def fitted_inputs(
    before: int, last: int, channels: int, *, after_reduction: bool, affine: bool
) -> tuple[nn.Module, nn.Module]:
    """What brings a cell's two inputs to its channels, and to one resolution."""
    first: nn.Module
    if after_reduction:  # the cell before last is still of the larger resolution
        first = HalvedResolution(before, channels, affine)
    else:
        first = _fitted(before, channels, affine)
    return first, _fitted(last, channels, affine)


def _fitted(inputs: int, outputs: int, affine: bool) -> nn.Sequential:
    return nn.Sequential(
        nn.ReLU(), nn.Conv2d(inputs, outputs, 1, bias=False), nn.BatchNorm2d(outputs, affine=affine)
    )


def reductions(cells: int) -> tuple[int, int]:
    """Which cells halve the resolution and double the channels: after a third and two thirds.

    >>> reductions(8), reductions(20)
    ((2, 5), (6, 13))
    """
    return cells // 3, 2 * cells // 3
