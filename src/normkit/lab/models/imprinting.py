"""native:resnet12, and a classifier by directions that takes new classes from examples."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from normkit.errors import OptionError

FIRST_SCALE = 10.0  # of the cosines; learned


class ResNet12(nn.Module):
    """Four blocks of three 3×3 convolutions beside a 1×1 one, each pooled to half the size.

    Oreshkin et al. 2018; 64, 128, 256 and 512 channels for the usual ``width``.
    """

    def __init__(self, classes: int, shape: tuple[int, ...], *, width: int = 64) -> None:
        super().__init__()
        channels = [shape[0], width, 2 * width, 4 * width, 8 * width]
        self.blocks = nn.Sequential(*(PooledBlock(channels[i], channels[i + 1]) for i in range(4)))
        self.fc = nn.Linear(channels[-1], classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

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


class ImprintedNetwork(nn.Module):
    """A network whose last linear layer compares directions (Qi, Brown & Lowe 2018).

    A class is a direction of the features; that of a new class is the mean of its examples'.
    """

    def __init__(self, network: nn.Module, classes: int) -> None:
        super().__init__()
        linear = [(path, m) for path, m in network.named_modules() if isinstance(m, nn.Linear)]
        if not linear or linear[-1][1].out_features != classes:
            raise OptionError(
                f"{type(network).__name__} does not end with a linear layer for {classes} classes: "
                "the classes of few-shot learning are directions of what goes into it."
            )
        path, last = linear[-1]
        network.set_submodule(path, nn.Identity())
        self.network = network
        self.weight = nn.Parameter(torch.empty(classes, last.in_features))
        nn.init.kaiming_uniform_(self.weight, a=5**0.5)  # as torch starts a linear layer
        self.scale = nn.Parameter(torch.tensor(FIRST_SCALE))

    def features(self, x: Tensor) -> Tensor:
        """Directions (N, D)."""
        return F.normalize(self.network(x), dim=1)

    def forward(self, x: Tensor) -> Tensor:
        cosines: Tensor = self.features(x) @ F.normalize(self.weight, dim=1).T
        return self.scale * cosines


def imprint(examples: Tensor) -> Tensor:
    """Directions (ways, D) of new classes, from those of their examples (ways, shots, D).

    >>> imprint(torch.tensor([[[1.0, 0.0], [0.0, 1.0]]]))
    tensor([[0.7071, 0.7071]])
    """
    return F.normalize(examples.mean(1), dim=1)
