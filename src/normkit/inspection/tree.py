"""A model as a tree of its modules, with norms as leaves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import nn

from normkit.inspection.kinds import LISTS, is_parametrization, is_weighted, kind_of

NO_FORWARD = (nn.Module.forward, nn.Sequential.forward)


@dataclass(eq=False)
class Node:
    """A module in its first place. What is inside a norm is part of the norm."""

    module: nn.Module
    path: str
    parent: Node | None = None
    children: list[Node] = field(default_factory=list)
    others: list[str] = field(default_factory=list)  # further paths of a shared module

    def __post_init__(self) -> None:
        self.is_norm = kind_of(self.module) is not None
        self.is_list = isinstance(self.module, LISTS) and not self.is_norm
        # a plain Sequential only says in which order its parts run
        self.has_forward = type(self.module).forward not in NO_FORWARD

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    def walk(self) -> Iterator[Node]:
        """This node and all below it, as named_modules() orders them."""
        yield self
        for child in self.children:
            yield from child.walk()

    def norms(self) -> list[Node]:
        return [node for node in self.walk() if node.is_norm]

    def weighted(self) -> list[Node]:
        """The convolutions, linear layers and what else has a weight matrix."""
        return [node for node in self.walk() if not node.is_norm and is_weighted(node.module)]

    def within(self, other: Node) -> bool:
        """Whether this is another node or below it."""
        node: Node | None = self
        while node is not None and node is not other:
            node = node.parent
        return node is other


def tree_of(model: nn.Module) -> Node:
    """The tree of a model."""
    return _grow(model, "", None, {})


def _grow(module: nn.Module, path: str, parent: Node | None, seen: dict[int, Node]) -> Node:
    node = seen[id(module)] = Node(module, path, parent)
    if node.is_norm:
        return node
    for name, child in module._modules.items():
        if child is None or is_parametrization(child) or name == "parametrizations":
            continue
        below = f"{path}.{name}" if path else name
        if id(child) not in seen:
            node.children.append(_grow(child, below, node, seen))
        elif not node.within(seen[id(child)]):  # a module inside itself would never end
            _again(seen[id(child)], below)
    return node


def _again(node: Node, path: str) -> None:
    """Note a further path of a module, and of all that is in it."""
    start = len(node.path)
    for each in list(node.walk()):
        rest = each.path[start:] if node.path else f".{each.path}"
        each.others.append(path + rest)
