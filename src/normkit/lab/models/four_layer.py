"""native:four_layer, the network of ws-bcn's figure 5."""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn

from normkit.lab.models.numbers import positive


class FourLayer(nn.Module):
    """Four 3×3 convolutions of 32 channels, each with a norm, ReLU and 2×2 average pooling, then a
    mean over what is left and a linear output: section 6.1.3 of ws-bcn.

    The size of the kernels is not printed there; 3×3 is the usual one.
    """

    def __init__(
        self, classes: int, shape: tuple[int, int, int], *, width: int = 32, depth: int = 4
    ) -> None:
        super().__init__()
        inputs, layers = shape[0], []
        for _ in range(positive("depth", depth)):
            layers.append(_layer(inputs, positive("width", width)))
            inputs = width
        self.layers = nn.Sequential(*layers)
        self.fc = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(self.layers(x).mean((2, 3)))
        return y


def _layer(inputs: int, outputs: int) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return nn.Sequential(
        OrderedDict(
            conv=conv,
            norm=nn.BatchNorm2d(outputs),
            act=nn.ReLU(inplace=True),
            pool=nn.AvgPool2d(2, ceil_mode=True),  # images smaller than 16×16 keep a position
        )
    )
