"""native:darts, the network of a genotype, and native:darts_search, in which it is found.

Both are cells of operations, as DARTS has them (Liu, Simonyan & Yang 2019, section 3.1): ReLU,
convolution, norm, in this order. A search has all operations on all edges of its cells at once,
weighted by a softmax of architecture parameters, which all cells of a kind share; what is strongest
in the end is the genotype. There, norms have no scale and shift of their own: the weights scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from normkit.errors import OptionError, nearest
from normkit.lab.models.genotypes import (
    EDGES,
    INPUTS,
    NONE,
    OPERATIONS,
    Edge,
    Genotype,
    edge_count,
    strongest,
)

STEM = 3  # times the channels of the first cell
POOLED = (128, 768)  # channels of the auxiliary head
FIRST_DEVIATION = 1e-3  # of architecture parameters: nearly the same weight for all


# ------------------------------------------------------------------ the network of a genotype


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


# ------------------------------------------------------------------ the search


class SearchNetwork(nn.Module):
    """A stem, ``cells`` cells with every one of ``operations`` on every edge, a linear layer.

    ``architecture`` is (2, edges, operations): of normal cells and of reductions. Norms of the
    edges have no scale and shift, as in DARTS, unless ``affine``.
    """

    def __init__(
        self,
        classes: int,
        shape: tuple[int, int, int],
        *,
        cells: int = 8,
        channels: int = 16,
        nodes: int = 4,
        operations: Sequence[str] = OPERATIONS,
        affine: bool = False,
    ) -> None:
        super().__init__()
        unknown = [name for name in operations if name not in OPERATIONS]
        if unknown:
            raise OptionError(
                f"there is no operation {unknown[0]!r}. {nearest(str(unknown[0]), OPERATIONS)}"
            )
        if len({*operations} - {NONE}) < 2 or len({*operations}) < len(operations):
            raise OptionError(
                f"operations are {', '.join(operations) or 'none'}, expected at least two "
                f'different ones beside "{NONE}" to choose from, each once.'
            )
        self.operations = tuple(operations)
        self.stem = stem(shape[0], channels)
        self.cells = nn.ModuleList()
        before = last = STEM * channels
        after_reduction = False
        for number in range(cells):
            reduction = number in reductions(cells)
            channels *= 1 + reduction
            inputs = fitted_inputs(
                before, last, channels, after_reduction=after_reduction, affine=affine
            )
            self.cells.append(
                SearchCell(self.operations, nodes, channels, reduction, inputs, affine)
            )
            before, last, after_reduction = last, channels * nodes, reduction
        self.fc = nn.Linear(last, classes)
        first = FIRST_DEVIATION * torch.randn(2, edge_count(nodes), len(self.operations))
        self.architecture = nn.Parameter(first)

    def architecture_parameters(self) -> list[nn.Parameter]:
        """What a search learns on other images than the weights."""
        return [self.architecture]

    def genotype(self) -> Genotype:
        """The cells that the search would end with now."""
        return Genotype(*(strongest(weights, self.operations) for weights in self.architecture))

    def forward(self, x: Tensor) -> Tensor:
        shares = torch.softmax(self.architecture, dim=2)
        before = last = self.stem(x)
        for number, cell in enumerate(self.cells):
            kind = int(number in reductions(len(self.cells)))
            before, last = last, cell(before, last, shares[kind])
        y: Tensor = self.fc(last.mean((2, 3)))
        return y


class SearchCell(nn.Module):
    """Nodes that add up everything before them, through all operations."""

    def __init__(
        self,
        operations: Sequence[str],
        nodes: int,
        channels: int,
        reduction: bool,
        inputs: tuple[nn.Module, nn.Module],
        affine: bool,
    ) -> None:
        super().__init__()
        self.nodes = nodes
        self.fit_before, self.fit_last = inputs
        self.edges = nn.ModuleList(
            nn.ModuleList(
                operation(
                    name, channels, 1 + (reduction and state < 2), searched=True, affine=affine
                )
                for name in operations
                if name != NONE  # its weight counts, its output is zero
            )
            for node in range(nodes)
            for state in range(INPUTS + node)
        )
        self.columns = [i for i, name in enumerate(operations) if name != NONE]

    def forward(self, before: Tensor, last: Tensor, shares: Tensor) -> Tensor:
        states = [self.fit_before(before), self.fit_last(last)]
        # all numbers at once: each index of its own would have a backward of the whole table
        numbers = shares.flatten().unbind()
        rows = iter(range(len(self.edges)))
        for _ in range(self.nodes):
            parts = [
                numbers[shares.shape[1] * row + column] * chosen(state)
                for state, row in zip(states, rows, strict=False)
                for column, chosen in zip(self.columns, self.edges[row], strict=True)  # type: ignore[call-overload]
            ]
            states.append(sum(parts[1:], parts[0]))
        return torch.cat(states[INPUTS:], dim=1)


# ------------------------------------------------------------------ what cells are made of


def reductions(cells: int) -> tuple[int, int]:
    """Which cells halve the resolution and double the channels: after a third and two thirds.

    >>> reductions(8), reductions(20)
    ((2, 5), (6, 13))
    """
    if cells < 3:
        raise OptionError(f"cells is {cells}, expected 3 or more: two of them are reductions.")
    return cells // 3, 2 * cells // 3


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
        y: Tensor = self.norm(torch.cat([self.conv1(x), self.conv2(between)], dim=1))
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
