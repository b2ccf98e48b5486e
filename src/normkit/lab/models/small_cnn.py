"""native:small_cnn, a network that trains in seconds on a CPU."""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn

from normkit.lab.models.numbers import positive


class SmallCNN(nn.Module):
    """Three 3×3 convolutions with stride 1, 2, 2, each with a norm and ReLU; then a mean and a
    linear output.

    Made for the 8×8 digits, where its last maps have 2×2 positions: with two samples a worker a
    batch norm there sees eight values a channel, so the noise of small batches shows as it does
    in the last stages of large networks. ``width`` is the number of channels of the first layer;
    each further one has twice as many.
    """

    def __init__(self, classes: int, shape: tuple[int, int, int], *, width: int = 16) -> None:
        super().__init__()
        self.conv1 = _layer(shape[0], positive("width", width), stride=1)
        self.conv2 = _layer(width, 2 * width, stride=2)
        self.conv3 = _layer(2 * width, 4 * width, stride=2)
        self.fc = nn.Linear(4 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv3(self.conv2(self.conv1(x)))
        y: Tensor = self.fc(x.mean((2, 3)))
        return y


def _layer(inputs: int, outputs: int, stride: int) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return nn.Sequential(
        OrderedDict(conv=conv, norm=nn.BatchNorm2d(outputs), act=nn.ReLU(inplace=True))
    )
