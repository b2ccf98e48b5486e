"""Where each norm stands: in which block, at which position, on the shortcut, in the stem."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch.nn.modules.conv import _ConvNd

from normkit.inspection.blocks import blocks_of
from normkit.inspection.flow import guessed
from normkit.inspection.tree import Node

SHORTCUTS = ("downsample", "down_sample", "shortcut", "skip", "identity")


@dataclass(frozen=True)
class Place:
    """The fields of a ``Site`` about its place."""

    block: str | None = None
    block_index: int | None = None
    position: int | None = None
    last_in_block: bool = False
    shortcut: bool = False
    stem: bool = False


def places_of(tree: Node) -> dict[str, Place]:
    """The place of each norm, by path.

    A norm is on the shortcut if a name between block and norm says so (downsample, shortcut, skip,
    identity), or if the channel counts do: the convolutions of the block make two chains from the
    same number of channels to the same number, one longer than the other. The stem is what comes,
    in the order of registration, before the first block.
    """
    feeders = {norm: feeder for norm, (feeder, _) in guessed(tree).items()}
    norms = tree.norms()
    order = {id(node): i for i, node in enumerate(tree.walk())}
    blocks = blocks_of(tree)
    first = min((order[id(block)] for block in blocks), default=-1)
    places = {n.path: Place(stem=order[id(n)] < first) for n in norms}
    for index, block in enumerate(blocks):
        inside = block.norms()
        aside = _named_shortcuts(block, inside) or _chained_shortcuts(block, inside, feeders)
        main = [norm for norm in inside if norm not in aside]
        for norm in inside:
            position = None if norm in aside else 1 + main.index(norm)
            places[norm.path] = Place(
                block=block.path,
                block_index=index,
                position=position,
                last_in_block=position == len(main),
                shortcut=norm in aside,
            )
    return places


def _named_shortcuts(block: Node, norms: list[Node]) -> list[Node]:
    start = len(block.path)
    found = [
        norm
        for norm in norms
        if any(word in part.lower() for part in norm.path[start:].split(".") for word in SHORTCUTS)
    ]
    return found if len(found) < len(norms) else []


def _chained_shortcuts(
    block: Node, norms: list[Node], feeders: dict[str, str | None]
) -> list[Node]:
    """Norms fed by the convolutions of the shorter of two chains with the same ends."""
    convolutions: list[Any] = [n for n in block.walk() if isinstance(n.module, _ConvNd)]
    chains: list[list[Any]] = [convolutions[:1]]
    for before, after in pairwise(convolutions):
        if after.module.in_channels == before.module.out_channels:
            chains[-1].append(after)
        else:
            chains.append([after])
    if len(chains) != 2:
        return []
    ends = {(chain[0].module.in_channels, chain[-1].module.out_channels) for chain in chains}
    short, main = sorted(chains, key=len)
    if len(ends) != 1 or len(short) == len(main):
        return []
    paths = [node.path for node in short]
    return [norm for norm in norms if feeders[norm.path] in paths]
