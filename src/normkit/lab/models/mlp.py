"""native:mlp, the network on which estimation shift is measured."""

from __future__ import annotations

import math
from collections import OrderedDict
from itertools import pairwise

from torch import Tensor, nn

from normkit.lab.models.numbers import positive


class Layer(nn.Sequential):
    """Linear, norm, ReLU."""

    def __init__(self, inputs: int, width: int, norm: bool) -> None:
        parts: OrderedDict[str, nn.Module] = OrderedDict(linear=nn.Linear(inputs, width))
        if norm:
            parts["norm"] = nn.BatchNorm1d(width)
        parts["act"] = nn.ReLU()
        super().__init__(parts)


class MLP(nn.Module):
    """``depth`` times Linear, BatchNorm1d, ReLU with ``width`` units, and a linear output.

    The "20-layer MLP" of estimation-shift, read as 20 normalized layers before the output.
    ``norm=False`` leaves the norms out, as in the comparison without them.
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
        sizes = [math.prod(shape), *[positive("width", width)] * positive("depth", depth)]
        self.layers = nn.Sequential(
            *(Layer(before, after, norm) for before, after in pairwise(sizes))
        )
        self.fc = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(self.layers(x.flatten(1)))
        return y
