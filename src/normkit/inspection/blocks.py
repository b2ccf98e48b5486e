"""Which modules of a model are its blocks.

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

from collections import Counter

from normkit.inspection.sums import adds
from normkit.inspection.tree import Node
from normkit.inspection.units import alike, innermost, is_unit, units_of


def blocks_of(tree: Node) -> list[Node]:
    """The blocks of a model, in the order of registration; a norm outside of units may be one."""
    candidates = [node for node in tree.walk() if node is not tree and _is_candidate(node)]
    listed = _listed(candidates)
    found = listed or _siblings(candidates)
    if not found:
        return alike(tree) or units_of(tree)
    inner = innermost(found)
    first = min(candidates.index(node) for node in inner)
    inner = _summing(found, inner)
    kinds = {type(node.module) for node in inner}
    if not listed:  # a stage with one block looks like a block itself, but for what others hold
        inner = [n for n in inner if not _holds(n, candidates, kinds - {type(n.module)})]
    later = [c for c in candidates[first:] if type(c.module) in kinds and not _overlaps(c, inner)]
    chosen = {id(node) for node in (*inner, *innermost(later), *_leading_units(inner))}
    return [node for node in tree.walk() if id(node) in chosen]


def _is_candidate(node: Node) -> bool:
    return _is_module(node) and not is_unit(node)


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
    found = []
    for parent in {id(node.parent): node.parent for node in candidates}.values():
        own = [node for node in candidates if node.parent is parent]
        often = Counter(type(node.module) for node in own)
        places = [i for i, node in enumerate(own) if often[type(node.module)] > 1]
        if places:
            found += own[places[0] : places[-1] + 1]
    return found


def _leading_units(blocks: list[Node]) -> list[Node]:
    """Units before the first block, in lists of units that stand in the list of the blocks.

    So begin networks whose first stage has simpler blocks, as EfficientNetV2.
    """
    outer = _list(blocks[0])
    if outer is None or not outer.is_list:
        return []
    found = []
    for stage in outer.children:
        if any(block.within(stage) for block in blocks):
            break
        parts = [child for child in stage.children if child.norms()]
        if stage.is_list and not stage.has_forward and all(map(_is_module, parts)):
            found += parts
    return found


def _summing(found: list[Node], inner: list[Node]) -> list[Node]:
    """The inner ones, or the ones around them that add what these do not."""
    chosen = list(inner)
    for node in found:
        inside = [each for each in chosen if each is not node and each.within(node)]
        if inside and adds(node.module) and not any(adds(each.module) for each in inside):
            chosen = [each for each in chosen if each not in inside] + [node]
    return chosen


def _holds(node: Node, candidates: list[Node], kinds: set[type]) -> bool:
    return any(c is not node and type(c.module) in kinds and c.within(node) for c in candidates)


def _overlaps(node: Node, blocks: list[Node]) -> bool:
    return any(node.within(block) or block.within(node) for block in blocks)
