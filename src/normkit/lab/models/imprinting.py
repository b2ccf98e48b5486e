"""A classifier by directions that takes new classes from examples."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from normkit.errors import OptionError

FIRST_SCALE = 10.0  # of the cosines; learned


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
