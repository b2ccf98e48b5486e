"""Which modules of a model are its blocks, and where each norm stands in them.

A block is what a network repeats: the bottleneck of a ResNet, the inverted residual of a
MobileNet, the layer of a transformer. They are found by structure, not by the names of classes:

1. A *candidate* is a module with a forward of its own that holds norms and is more than a unit. A
   *unit* holds one norm and either a single weight or none after the norm, as ConvNormAct does.
2. Blocks are the candidates that stand in a list (Sequential, ModuleList, ModuleDict), if their
   class does so more than once or another one stands in the same list; lists within lists count
   as one.
3. Where there are none, as in models that keep them as attributes: candidates with a sibling of the
   same class, and other candidates between such siblings.
4. Where there are none, plain Sequentials with several norms that have the same parts as another.
5. Where there are none, as in VGG: each unit, or norm alone, counts as a block.

Of blocks within blocks the inner ones count, since a stage is no block; but the outer one does if
its forward adds, as a residual block does, and theirs do not. To blocks found in 2 and 3 come
modules of the same classes that are registered later, and stages of units that lead the list.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections import Counter
from functools import cache
from itertools import pairwise
from typing import Any

from torch.nn.modules.conv import _ConvNd

from normkit.inspection.flow import Neighbours
from normkit.inspection.tree import Node

SHORTCUTS = ("downsample", "down_sample", "shortcut", "skip", "identity")


def places_of(tree: Node, neighbours: Neighbours) -> dict[str, dict[str, Any]]:
    """The fields of a ``Site`` about its place, by the path of each norm.

    A norm is on the shortcut if a name between block and norm says so (downsample, shortcut, skip,
    identity), or if the channel counts do: the convolutions of the block make two chains from the
    same number of channels to the same number, one longer than the other. The stem is what comes,
    in the order of registration, before the first block. ``neighbours`` may be guessed.
    """
    feeders = {norm: feeder for norm, (feeder, _) in neighbours.items()}
    order = {id(node): i for i, node in enumerate(tree.walk())}
    blocks = blocks_of(tree)
    first = min((order[id(block)] for block in blocks), default=-1)
    places: dict[str, dict[str, Any]] = {
        norm.path: {"stem": order[id(norm)] < first} for norm in tree.norms()
    }
    for index, block in enumerate(blocks):
        inside = block.norms()
        aside = _named_shortcuts(block, inside) or _chained_shortcuts(block, inside, feeders)
        main = [norm for norm in inside if norm not in aside]
        for norm in inside:
            position = None if norm in aside else 1 + main.index(norm)
            places[norm.path] = {
                "block": block.path,
                "block_index": index,
                "position": position,
                "last_in_block": position == len(main),
                "shortcut": norm in aside,
            }
    return places


def _named_shortcuts(block: Node, norms: list[Node]) -> list[Node]:
    below = {norm: norm.path[len(block.path) :].lower() for norm in norms}
    named = [norm for norm in norms if any(word in below[norm] for word in SHORTCUTS)]
    return named if len(named) < len(norms) else []


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


# -------------------------------------------------------------------- the blocks


def blocks_of(tree: Node) -> list[Node]:
    """The blocks of a model, in the order of registration; a norm outside of units may be one."""
    modules = [node for node in tree.walk() if node is not tree and _is_module(node)]
    candidates = [node for node in modules if not _is_unit(node)]
    listed = _listed(candidates)
    repeated = listed or _siblings(candidates)
    if not repeated:
        return _sequentials_alike(tree) or _units(tree)
    inner = _innermost(repeated)
    first = min(candidates.index(node) for node in inner)
    inner = _adding(repeated, inner)
    kinds = {type(node.module) for node in inner}

    def is_stage(node: Node) -> bool:
        """A stage with one block looks like a block itself, but for what others hold."""
        others = [
            c for c in candidates if c is not node and type(c.module) is not type(node.module)
        ]
        return any(type(c.module) in kinds and c.within(node) for c in others)

    if not listed:
        inner = [node for node in inner if not is_stage(node)]
    later = [
        c
        for c in candidates[first:]
        if type(c.module) in kinds and not any(c.within(b) or b.within(c) for b in inner)
    ]
    chosen = {id(node) for node in (*inner, *_innermost(later), *_leading_units(inner))}
    return [node for node in tree.walk() if id(node) in chosen]


def _is_module(node: Node) -> bool:
    """Whether a node has a forward of its own and holds norms, but is none."""
    return node.has_forward and not node.is_norm and bool(node.norms())


def _listed(candidates: list[Node]) -> list[Node]:
    """Candidates in lists, if there are several of their class or in the same list."""
    listed = [node for node in candidates if node.parent is not None and node.parent.is_list]
    often = Counter(type(node.module) for node in listed)
    lists = {id(node): id(_list(node)) for node in listed}
    together = Counter(lists.values())
    repeated = {lists[id(node)] for node in listed if often[type(node.module)] > 1}
    full = repeated | {key for key, count in together.items() if count > 1}
    return [node for node in listed if lists[id(node)] in full]


def _list(node: Node) -> Node | None:
    """The outermost list a node is part of, through plain lists only."""
    outer = node.parent
    while outer is not None and not outer.has_forward and outer.parent and outer.parent.is_list:
        outer = outer.parent
    return outer


def _siblings(candidates: list[Node]) -> list[Node]:
    """Candidates of one class under one parent, and what stands between them."""
    siblings = []
    for parent in {id(node.parent): node.parent for node in candidates}.values():
        own = [node for node in candidates if node.parent is parent]
        often = Counter(type(node.module) for node in own)
        places = [i for i, node in enumerate(own) if often[type(node.module)] > 1]
        if places:
            siblings += own[places[0] : places[-1] + 1]
    return siblings


def _leading_units(blocks: list[Node]) -> list[Node]:
    """Units before the first block, in lists of units that stand in the list of the blocks.

    So begin networks whose first stage has simpler blocks, as EfficientNetV2.
    """
    outer = _list(blocks[0])
    if outer is None or not outer.is_list:
        return []
    units = []
    for stage in outer.children:
        if any(block.within(stage) for block in blocks):
            break
        parts = [child for child in stage.children if child.norms()]
        if stage.is_list and not stage.has_forward and all(map(_is_module, parts)):
            units += parts
    return units


def _adding(repeated: list[Node], inner: list[Node]) -> list[Node]:
    """The inner ones, or the ones around them that add what these do not."""

    def adds(node: Node) -> bool:
        kind: Any = type(node.module)
        return _adds(kind)

    chosen = list(inner)
    for node in repeated:
        inside = [each for each in chosen if each is not node and each.within(node)]
        if inside and adds(node) and not any(map(adds, inside)):
            chosen = [each for each in chosen if each not in inside] + [node]
    return chosen


def _is_unit(node: Node) -> bool:
    """One norm, and a single weight or none after the norm."""
    norms = node.norms()
    if len(norms) != 1:
        return False
    order = {id(each): i for i, each in enumerate(node.walk())}
    weights = node.weighted()
    return len(weights) < 2 or all(order[id(w)] < order[id(norms[0])] for w in weights)


def _sequentials_alike(tree: Node) -> list[Node]:
    """Plain Sequentials with several norms, and the same parts as another."""
    lists = [
        node
        for node in tree.walk()
        if node.is_list and not node.has_forward and len(node.norms()) > 1 and node is not tree
    ]
    parts = {id(node): tuple(type(each.module) for each in node.walk()) for node in lists}
    often = Counter(parts.values())
    return _innermost([node for node in lists if often[parts[id(node)]] > 1])


def _units(tree: Node) -> list[Node]:
    """Each norm with the unit around it."""
    units = {}
    for norm in tree.norms():
        unit = norm
        while (above := unit.parent) is not None and above is not tree and len(above.norms()) == 1:
            unit = above
        units[id(unit)] = unit
    return list(units.values())


def _innermost(nodes: list[Node]) -> list[Node]:
    """Those that contain no other."""
    outer = set()
    for node in nodes:
        above = node.parent
        while above is not None:
            outer.add(id(above))
            above = above.parent
    return [node for node in nodes if id(node) not in outer]


@cache
def _adds(kind: type[Any]) -> bool:
    """Whether ``forward`` contains a sum of two things that are not plain numbers or texts.

    Read from the source, without running the model. False where there is none, as for classes
    typed into a console.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind.forward)))
    except (OSError, TypeError, SyntaxError):
        return False
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            parts = [node.left, node.right]
        elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
            parts = [node.value]
        else:
            continue
        if not any(isinstance(part, ast.Constant) for part in parts):
            return True
    return False
