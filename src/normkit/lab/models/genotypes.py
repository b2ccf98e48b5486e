"""What a cell of an architecture search is made of, written down: the genotype.

A cell has two inputs, the outputs of the two cells before it, and a row of nodes; a node adds up
two operations, each on an input or an earlier node. States are numbered from the inputs on, 0 and
1, then the nodes. The output is all nodes, side by side (Liu, Simonyan & Yang 2019, DARTS).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from normkit.errors import OptionError, UnknownName, nearest

INPUTS = 2  # of a cell
EDGES = 2  # into a node
NONE = "none"  # the operation that gives zeros: part of a search, never of a genotype
OPERATIONS = (
    NONE,
    "max_pool_3x3",
    "avg_pool_3x3",
    "skip_connect",
    "sep_conv_3x3",
    "sep_conv_5x5",
    "dil_conv_3x3",
    "dil_conv_5x5",
)

Edge = tuple[str, int]  # an operation, and the state that it works on


@dataclass(frozen=True)
class Genotype:
    """The edges of both kinds of cells, two for each node in turn.

    ``reduce`` is that of the two cells that halve the resolution.
    """

    normal: tuple[Edge, ...]
    reduce: tuple[Edge, ...]

    def __post_init__(self) -> None:
        for kind, edges in (("normal", self.normal), ("reduce", self.reduce)):
            _check_cell(kind, edges)

    @classmethod
    def of(cls, given: Any) -> Genotype:
        """From a published name, or a table of two lists of edges, as a search leaves it.

        >>> found = Genotype.of({"normal": [["skip_connect", 0], ["sep_conv_3x3", 1]],
        ...                      "reduce": [["max_pool_3x3", 0], ["max_pool_3x3", 1]]})
        >>> found.normal
        (('skip_connect', 0), ('sep_conv_3x3', 1))
        """
        if isinstance(given, Genotype):
            return given
        if isinstance(given, str):
            if given not in PUBLISHED:
                raise UnknownName(
                    f"there is no genotype {given!r}. {nearest(given, PUBLISHED)} Of your own: "
                    '{ normal = [["sep_conv_3x3", 0], …], reduce = […] }.'
                )
            return PUBLISHED[given]
        if not isinstance(given, Mapping) or set(given) != {"normal", "reduce"}:
            came = sorted(given) if isinstance(given, Mapping) else type(given).__name__
            raise OptionError(
                f"genotype is {came}, expected a name such as {next(iter(PUBLISHED))!r}, or a "
                "table with normal and reduce."
            )
        return cls(*(_edges(kind, given[kind]) for kind in ("normal", "reduce")))

    def to_toml(self) -> str:
        """As an option of native:darts, for an experiment's file."""
        normal, reduce = (json.dumps([list(e) for e in c]) for c in (self.normal, self.reduce))
        return f"genotype = {{ normal = {normal}, reduce = {reduce} }}"

    def lines(self) -> list[str]:
        """The cells as people read them, a line for each node."""
        lines = []
        for kind, edges in (("normal", self.normal), ("reduce", self.reduce)):
            for node in range(len(edges) // EDGES):
                parts = edges[EDGES * node : EDGES * (node + 1)]
                sum_ = " + ".join(f"{name}({state_name(state)})" for name, state in parts)
                lines.append(f"{kind}: {state_name(INPUTS + node)} = {sum_}")
        return lines


def state_name(state: int) -> str:
    """Of an input or a node of a cell.

    >>> [state_name(state) for state in range(4)]
    ['the cell before last', 'the last cell', 'node 1', 'node 2']
    """
    return ("the cell before last", "the last cell")[state] if state < 2 else f"node {state - 1}"


def strongest(weights: Tensor, operations: Sequence[str]) -> tuple[Edge, ...]:
    """The edges of a cell that a search ends with, from the weights (edges, operations) of all.

    An edge is as strong as its strongest operation, "none" apart; a node keeps the strongest two.
    """
    shares = torch.softmax(weights.detach().double(), 1).cpu()
    if NONE in operations:
        shares[:, operations.index(NONE)] = -1.0
    best = shares.max(1)
    edges: list[Edge] = []
    first, states = 0, INPUTS
    while first < len(shares):
        kept = best.values[first : first + states].argsort(descending=True, stable=True)[:EDGES]
        for state in sorted(kept.tolist()):
            edges.append((operations[int(best.indices[first + state])], state))
        first, states = first + states, states + 1
    return tuple(edges)


def edge_count(nodes: int) -> int:
    """How many edges a search has in a cell: into each node from every state before it.

    >>> edge_count(4)
    14
    """
    return sum(INPUTS + node for node in range(nodes))


def _edges(kind: str, given: Any) -> tuple[Edge, ...]:
    pairs = list(given) if isinstance(given, list | tuple) else None
    if pairs is None or not all(isinstance(p, list | tuple) and len(p) == 2 for p in pairs):
        raise OptionError(
            f'genotype.{kind} is {given!r}, expected a list of edges such as ["skip_connect", 0].'
        )
    return tuple((name, state) for name, state in pairs)


def _check_cell(kind: str, edges: Sequence[Edge]) -> None:
    if not edges or len(edges) % EDGES:
        raise OptionError(
            f"genotype.{kind} has {len(edges)} edges, expected {EDGES} for each node of the cell."
        )
    allowed = [name for name in OPERATIONS if name != NONE]
    for number, (name, state) in enumerate(edges):
        where, states = f"genotype.{kind}, edge {number + 1}", INPUTS + number // EDGES
        if name not in allowed:
            hint = nearest(str(name), allowed)
            raise OptionError(f"{where}: there is no operation {name!r}. {hint}")
        if not isinstance(state, int) or isinstance(state, bool) or not 0 <= state < states:
            raise OptionError(
                f"{where} begins at state {state!r}, expected one of 0 to {states - 1}: the two "
                "inputs, then the nodes before it."
            )


# what DARTS has found on CIFAR-10: by its first-order search and by its second-order one
PUBLISHED: Mapping[str, Genotype] = {
    "darts-v2": Genotype(
        normal=(
            ("sep_conv_3x3", 0),
            ("sep_conv_3x3", 1),
            ("sep_conv_3x3", 0),
            ("sep_conv_3x3", 1),
            ("sep_conv_3x3", 1),
            ("skip_connect", 0),
            ("skip_connect", 0),
            ("dil_conv_3x3", 2),
        ),
        reduce=(
            ("max_pool_3x3", 0),
            ("max_pool_3x3", 1),
            ("skip_connect", 2),
            ("max_pool_3x3", 1),
            ("max_pool_3x3", 0),
            ("skip_connect", 2),
            ("skip_connect", 2),
            ("max_pool_3x3", 1),
        ),
    ),
    "darts-v1": Genotype(
        normal=(
            ("sep_conv_3x3", 1),
            ("sep_conv_3x3", 0),
            ("skip_connect", 0),
            ("sep_conv_3x3", 1),
            ("skip_connect", 0),
            ("sep_conv_3x3", 1),
            ("sep_conv_3x3", 0),
            ("skip_connect", 2),
        ),
        reduce=(
            ("max_pool_3x3", 0),
            ("max_pool_3x3", 1),
            ("skip_connect", 2),
            ("max_pool_3x3", 0),
            ("max_pool_3x3", 0),
            ("skip_connect", 2),
            ("skip_connect", 2),
            ("avg_pool_3x3", 0),
        ),
    ),
}
