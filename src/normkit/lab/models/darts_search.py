"""native:darts_search: all operations on all edges of the cells at once, weighted.

Liu, Simonyan & Yang 2019. The weights of an edge are a softmax of architecture parameters, which
all cells of a kind share. What is strongest in the end is the genotype.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from normkit.errors import OptionError, nearest
from normkit.lab.models.cell_operations import STEM, fitted_inputs, operation, reductions, stem
from normkit.lab.models.genotypes import (
    INPUTS,
    NONE,
    OPERATIONS,
    Genotype,
    edge_count,
    strongest,
)

FIRST_DEVIATION = 1e-3  # of architecture parameters: nearly the same weight for all


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
        if cells < 3:
            raise OptionError(f"cells is {cells}, expected 3 or more: two of them are reductions.")
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
