"""The forward of one module as a graph in which norms do the sums and activations after them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.modules.conv import _ConvNd

from normkit.conversion.belongings import is_hooked
from normkit.conversion.tracing import traced
from normkit.layers.base import Normalizer
from normkit.layers.norm_act import NormAct

SUMS: tuple[Any, ...] = (operator.add, operator.iadd, torch.add, "add", "add_")
ACTIVATIONS: dict[str, tuple[Any, ...]] = {
    "relu": (F.relu, torch.relu, torch.relu_, F.relu_, "relu", "relu_", nn.ReLU),
    "silu": (F.silu, nn.SiLU),
}


def fused_graph(module: nn.Module) -> fx.Graph | None:
    """The forward of a module after fusing; None if there is nothing to fuse or it cannot be."""
    norms = [child for child in module.children() if isinstance(child, Normalizer | NormAct)]
    if not norms:
        return None
    graph = traced(module)
    return graph if graph is not None and _fuse(graph, module) else None


def with_sum(norm: Any, x: Tensor, residual: Tensor, activation: str) -> Tensor:
    """activation(norm(x) + residual), in one pass if the two have the same shape and type."""
    traced = not isinstance(x, Tensor)  # a stand-in of torch.fx, which has no shape: say yes
    if traced or (residual.shape == x.shape and residual.dtype == x.dtype):
        y: Tensor = (
            norm(x, residual) if isinstance(norm, NormAct) else norm(x, residual, activation)
        )
        return y
    y = norm(x) + residual  # a mean or an embedding that is broadcast
    return y if activation == "none" else getattr(F, activation)(y)


def _fuse(graph: fx.Graph, module: nn.Module) -> bool:
    """Let every norm take over what follows it; whether there was anything."""
    changed = False
    _skip_identities(graph, module)
    for node in list(graph.nodes):
        norm = _norm_of(node, module)
        if norm is None:
            continue
        residual, end, act = None, node, "none"
        total = _only_user(node)
        if total is not None and _is(total, SUMS, module) and _plain_sum(total):
            movable = total is node.next or _is_fresh(node.args[0], module)
            others = [n for n in total.all_input_nodes if n is not node]
            residual, end = (others[0], total) if movable else (None, node)
        place, after = end, _only_user(end)
        for name, kinds in ACTIVATIONS.items():
            if after is not None and _is(after, kinds, module) and not _hooked(after, module):
                act, end = name, after
        if end is node:
            continue
        if isinstance(norm, NormAct) and (act != "none" or norm.fused != "none"):
            continue  # it has an activation of its own, before the sum
        _replace(graph, node, place, end, residual, act)
        changed = True
    return changed


def _replace(
    graph: fx.Graph, node: fx.Node, place: fx.Node, end: fx.Node, residual: Any, act: str
) -> None:
    """One call at ``place``, where the norm or the sum is now, for all from ``node`` to ``end``."""
    with graph.inserting_before(place):
        if residual is None:
            new = graph.call_module(str(node.target), (node.args[0], None, act))
        else:
            norm = graph.create_node("get_attr", str(node.target))
            new = graph.call_function(with_sum, (norm, node.args[0], residual, act))
    end.replace_all_uses_with(new)
    # one by one: graph.eliminate_dead_code() would take changes in place for dead
    for gone in dict.fromkeys((end, place, node)):
        graph.erase_node(gone)


def _skip_identities(graph: fx.Graph, module: nn.Module) -> None:
    """Leave out what does nothing, such as a drop layer that timm has turned off."""
    for node in list(graph.nodes):
        inputs = node.all_input_nodes
        idle = _is(node, (nn.Identity,), module) and not _hooked(node, module)
        if idle and len(inputs) == 1:
            node.replace_all_uses_with(inputs[0])
            graph.erase_node(node)


def _is_fresh(x: Any, module: nn.Module) -> bool:
    """Whether nothing but the norm can know a tensor, so that the norm may run later."""
    if not isinstance(x, fx.Node) or x.op != "call_module" or len(x.users) != 1:
        return False
    return isinstance(module.get_submodule(str(x.target)), _ConvNd | nn.Linear)


def _norm_of(node: fx.Node, module: nn.Module) -> nn.Module | None:
    if node.op != "call_module" or len(node.args) != 1 or node.kwargs:
        return None
    found = module.get_submodule(str(node.target))
    return found if isinstance(found, Normalizer | NormAct) and not is_hooked(found) else None


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _is(node: fx.Node, kinds: tuple[Any, ...], module: nn.Module) -> bool:
    target: str | Callable[..., Any] | type = node.target
    if node.op == "call_module":
        target = type(module.get_submodule(str(node.target)))
    return node.op in ("call_function", "call_method", "call_module") and target in kinds


def _hooked(node: fx.Node, module: nn.Module) -> bool:
    return node.op == "call_module" and is_hooked(module.get_submodule(str(node.target)))


def _plain_sum(node: fx.Node) -> bool:
    """Whether it adds two different nodes, and nothing else."""
    two = [a for a in node.args if isinstance(a, fx.Node)]
    return len(node.args) == 2 and len(two) == 2 and two[0] is not two[1] and not node.kwargs
