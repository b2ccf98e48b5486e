"""native:darts: the network of a genotype, as DARTS and MANAS train it on CIFAR-10."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from normkit.errors import OptionError
from normkit.lab.models.cell_operations import STEM, fitted_inputs, operation, reductions, stem
from normkit.lab.models.genotypes import EDGES, Edge, Genotype

POOLED = (128, 768)  # channels of the auxiliary head


class DartsNetwork(nn.Module):
    """A stem, ``cells`` cells of a genotype, and a linear layer on what is left of the pixels.

    ``channels`` are those of a cell's nodes before the first of two reductions, which double them.
    ``auxiliary`` puts a second classifier after the second reduction: in training the output is
    then (logits, its logits), and the task adds its loss. ``drop_path`` is the share of edges, of
    each image, that are left out in the last epoch; it grows with the epochs from 0 on. Skips of
    the same resolution always stay.
    """

    drop_rate: Tensor

    def __init__(
        self,
        classes: int,
        shape: tuple[int, int, int],
        *,
        genotype: Any = "darts-v2",
        cells: int = 20,
        channels: int = 36,
        auxiliary: bool = False,
        drop_path: float = 0.0,
    ) -> None:
        super().__init__()
        if cells < 3:
            raise OptionError(f"cells is {cells}, expected 3 or more: two of them are reductions.")
        if not isinstance(drop_path, int | float) or not 0 <= drop_path < 1:
            raise OptionError(f"drop_path is {drop_path!r}, expected a share from 0 up to 1.")
        found = Genotype.of(genotype)
        self.drop_path = float(drop_path)
        self.stem = stem(shape[0], channels)
        self.cells = nn.ModuleList()
        before = last = STEM * channels
        after_reduction = False
        for number in range(cells):
            reduction = number in reductions(cells)
            channels *= 1 + reduction
            edges = found.reduce if reduction else found.normal
            cell = Cell(edges, before, last, channels, reduction, after_reduction)
            self.cells.append(cell)
            before, last, after_reduction = last, cell.outputs, reduction
            if number == reductions(cells)[1]:
                self.auxiliary = AuxiliaryHead(last, classes, shape) if auxiliary else None
        self.fc = nn.Linear(last, classes)
        self.register_buffer("drop_rate", torch.zeros(()), persistent=False)

    def set_progress(self, share: float) -> None:
        """How much of training is over: so much of ``drop_path`` is the rate by now."""
        self.drop_rate.fill_(self.drop_path * share)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        rate = self.drop_rate if self.training and self.drop_path else None
        before = last = self.stem(x)
        further: Tensor | None = None
        for number, cell in enumerate(self.cells):
            before, last = last, cell(before, last, rate)
            if self.training and self.auxiliary and number == reductions(len(self.cells))[1]:
                further = self.auxiliary(last)
        logits: Tensor = self.fc(last.mean((2, 3)))
        return logits if further is None else (logits, further)


class Cell(nn.Module):
    """The nodes of a genotype."""

    def __init__(
        self,
        edges: tuple[Edge, ...],
        before: int,
        last: int,
        channels: int,
        reduction: bool,
        after_reduction: bool,
    ) -> None:
        super().__init__()
        self.states = [state for _, state in edges]
        self.outputs = channels * len(edges) // EDGES
        self.fit_before, self.fit_last = fitted_inputs(
            before, last, channels, after_reduction=after_reduction, affine=True
        )
        self.operations = nn.ModuleList(
            # of a reduction's nodes, those that look at its inputs halve the resolution
            operation(name, channels, 1 + (reduction and state < 2), searched=False, affine=True)
            for name, state in edges
        )

    def forward(self, before: Tensor, last: Tensor, drop_rate: Tensor | None = None) -> Tensor:
        states = [self.fit_before(before), self.fit_last(last)]
        for first in range(0, len(self.operations), EDGES):
            parts = []
            for i in range(first, first + EDGES):
                y = self.operations[i](states[self.states[i]])
                if drop_rate is not None and not isinstance(self.operations[i], nn.Identity):
                    y = drop_path(y, drop_rate)
                parts.append(y)
            states.append(sum(parts[1:], parts[0]))
        return torch.cat(states[2:], dim=1)


class AuxiliaryHead(nn.Module):
    """A second classifier, in the middle of the network, for training alone."""

    def __init__(self, channels: int, classes: int, shape: tuple[int, int, int]) -> None:
        super().__init__()
        # from the 8×8 positions of CIFAR to 2×2; of smaller images there are fewer
        large = min(shape[1:]) >= 32
        pool = nn.AvgPool2d(5, 3, count_include_pad=False) if large else nn.AdaptiveAvgPool2d(2)
        first, second = POOLED
        self.layers = nn.Sequential(
            nn.ReLU(),
            pool,
            nn.Conv2d(channels, first, 1, bias=False),
            nn.BatchNorm2d(first),
            nn.ReLU(),
            nn.Conv2d(first, second, 2, bias=False),
            nn.BatchNorm2d(second),
            nn.ReLU(),
        )
        self.fc = nn.Linear(second, classes)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(self.layers(x).mean((2, 3)))
        return y


def drop_path(x: Tensor, rate: Tensor) -> Tensor:
    """Zero for a share of the images, and larger for the others, so that the mean stays."""
    kept = torch.rand(len(x), 1, 1, 1, device=x.device) >= rate
    return x * (kept / (1 - rate)).to(x.dtype)
