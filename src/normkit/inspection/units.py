"""What is too small for a block, and what stands in for blocks where a model has none."""

from __future__ import annotations

from collections import Counter

from normkit.inspection.tree import Node


def is_unit(node: Node) -> bool:
    """One norm, and a single weight or none after the norm."""
    norms = node.norms()
    if len(norms) != 1:
        return False
    order = {id(each): i for i, each in enumerate(node.walk())}
    weights = node.weighted()
    return len(weights) < 2 or all(order[id(w)] < order[id(norms[0])] for w in weights)


def alike(tree: Node) -> list[Node]:
    """Plain Sequentials with several norms, and the same parts as another."""
    lists = [
        node
        for node in tree.walk()
        if node.is_list and not node.has_forward and len(node.norms()) > 1 and node is not tree
    ]
    parts = {id(node): tuple(type(each.module) for each in node.walk()) for node in lists}
    often = Counter(parts.values())
    return innermost([node for node in lists if often[parts[id(node)]] > 1])


def units_of(tree: Node) -> list[Node]:
    """Each norm with the unit around it."""
    found = {}
    for norm in tree.norms():
        unit = norm
        while (above := unit.parent) is not None and above is not tree and len(above.norms()) == 1:
            unit = above
        found[id(unit)] = unit
    return list(found.values())


def innermost(nodes: list[Node]) -> list[Node]:
    """Those that contain no other."""
    outer = set()
    for node in nodes:
        above = node.parent
        while above is not None:
            outer.add(id(above))
            above = above.parent
    return [node for node in nodes if id(node) not in outer]
