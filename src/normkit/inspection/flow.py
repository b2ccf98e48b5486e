"""What feeds a norm and what follows it, guessed from the order of registration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd

from normkit.inspection.facts import channel_count
from normkit.inspection.kinds import is_activation
from normkit.inspection.tree import Node
from normkit.layers.norm_act import NormAct

Neighbours = dict[str, tuple[str | None, str | None]]
"""By the path of a norm: what feeds it, and the activation that follows it."""


def guessed(tree: Node) -> Neighbours:
    """Neighbours in the order in which modules were registered: right for most, but a guess.

    A norm is fed by the convolution or linear layer right before it if the channels agree. It is
    followed by the activation right after it or, if a convolution feeds it, by the only
    activation that its parent has, which many blocks use several times.
    """
    found: Neighbours = {}
    for owner in tree.walk():
        steps = [node for node in _sequence(owner) if not _does_nothing(node.module)]
        for i, norm in enumerate(steps):
            if norm.is_norm:
                feeder = _feeder(steps[i - 1], norm) if i else None
                after = steps[i + 1] if i + 1 < len(steps) else None
                act = after.path if after is not None and is_activation(after.module) else None
                found[norm.path] = feeder, act or (_only_activation(norm) if feeder else None)
    if tree.is_norm:
        found[""] = None, None
    return found


def out_channels(module: Any) -> int | None:
    """The channels a convolution or linear layer gives, 0 if lazy; None for other modules."""
    if isinstance(module, _ConvNd):
        return module.out_channels
    return module.out_features if isinstance(module, nn.Linear) else None


def fits(feeder: nn.Module, norm: nn.Module) -> bool:
    """Whether a layer gives as many channels as a norm takes; lazy ones may."""
    inner = norm.norm if isinstance(norm, NormAct) else norm
    given, taken = out_channels(feeder), channel_count(inner)
    return not given or not taken or given == taken


def _sequence(owner: Node) -> list[Node]:
    """What runs one after the other under a module: its children, nested Sequentials opened."""
    if not _is_plain(owner):
        return owner.children
    if owner.parent is not None and _is_plain(owner.parent):
        return []  # has been opened with its parent
    return list(_opened(owner))


def _opened(owner: Node) -> Iterator[Node]:
    for child in owner.children:
        if _is_plain(child):
            yield from _opened(child)
        else:
            yield child


def _is_plain(node: Node) -> bool:
    return isinstance(node.module, nn.Sequential) and not node.has_forward and not node.is_norm


def _does_nothing(module: nn.Module) -> bool:
    """Whether a module hands its input on in eval mode."""
    return isinstance(module, nn.Identity) or type(module).__name__.startswith("Drop")


def _feeder(before: Node, norm: Node) -> str | None:
    """The layer before a norm; of a module made of convolutions alone, the last of them."""
    leaves = [node for node in before.walk() if not node.children]
    separable = all(isinstance(node.module, _ConvNd) for node in leaves)
    if not separable and out_channels(before.module) is None:
        return None
    return leaves[-1].path if fits(leaves[-1].module, norm.module) else None


def _only_activation(norm: Node) -> str | None:
    parent = norm.parent
    siblings = [] if parent is None or parent.is_list else parent.children
    found = [node.path for node in siblings if is_activation(node.module)]
    return found[0] if len(found) == 1 else None
