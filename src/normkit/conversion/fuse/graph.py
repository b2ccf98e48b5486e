"""The forward of one module as a graph in which norms do the sums and activations after them."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.conv import _ConvNd

from normkit.conversion.edits import count_hooks
from normkit.conversion.fuse.convolution import FoldedConv2d
from normkit.engine.activations import NAMES, activated, name_of_call, name_of_module
from normkit.layers.base import Normalizer
from normkit.layers.norm_act import NormAct

SUMS: tuple[Any, ...] = (operator.add, operator.iadd, torch.add, "add", "add_")
HOSTS = (Normalizer, NormAct, FoldedConv2d)  # that can do what follows them
HOOKED = "it or what follows it has hooks, which would see other tensors"
ACTIVATED = "it has an activation of its own, before the sum"
ALONE = "in its module's forward neither a sum nor a known activation alone follows it"


@dataclass
class Fusing:
    """What of a module's forward its norms can do; by the names of those children."""

    graph: fx.Graph | None = None  # the new forward; None if there is nothing to fuse
    fused: dict[str, str] = field(default_factory=dict)  # what the norm does beside
    left: dict[str, str] = field(default_factory=dict)  # why it does no more


def fused_forward(module: nn.Module) -> Fusing:
    """The forward of a module after fusing; nothing is changed."""
    children = module.named_children()
    names = [name for name, child in children if isinstance(child, HOSTS)]
    if not names:
        return Fusing()
    graph = _traced(module)
    if isinstance(graph, str):
        return Fusing(left=dict.fromkeys(names, graph))
    fusing = Fusing(left=dict.fromkeys(names, ALONE))
    _skip_identities(graph, module)
    for node in list(graph.nodes):
        _fuse_from(node, graph, module, fusing)
    if fusing.fused:
        fusing.graph = graph
    return fusing


def own_forward(norm: nn.Module) -> str:
    """Why a norm is asked to do nothing beside if its class has a forward of its own, or it has."""
    if isinstance(norm, Normalizer):
        if "forward" in vars(norm):
            return f"the forward of this {type(norm).__name__} was replaced on the instance"
        if type(norm).forward is not Normalizer.forward:
            return f"{type(norm).__name__} has a forward of its own"
    return ""


def not_fused(follows: Any) -> str:
    """Why a norm does nothing beside, by the module that follows it, if any."""
    if isinstance(follows, nn.Module) and type(follows).__module__ == "torch.nn.modules.activation":
        return f"{follows} follows it, which is not fused: only {', '.join(NAMES[1:])} are"
    return ALONE


def with_sum(norm: Any, x: Tensor, residual: Tensor, activation: str) -> Tensor:
    """activation(norm(x) + residual), in one pass if the two have the same shape and type."""
    if isinstance(norm, FoldedConv2d):  # the shape of its output is its own business
        total: Tensor = norm(x, residual, activation)
        return total
    traced = not isinstance(x, Tensor)  # a stand-in of torch.fx, which has no shape: say yes
    if traced or (residual.shape == x.shape and residual.dtype == x.dtype):
        y: Tensor = (
            norm(x, residual) if isinstance(norm, NormAct) else norm(x, residual, activation)
        )
        return y
    y = norm(x) + residual  # a mean or an embedding that is broadcast
    return activated(y, activation)


def _fuse_from(node: fx.Node, graph: fx.Graph, module: nn.Module, fusing: Fusing) -> None:
    """Let a norm take over what follows it."""
    norm = _norm_at(node, module)
    if norm is None:
        return
    name = str(node.target)
    if obstacle := own_forward(norm) or (HOOKED if count_hooks(norm) else ""):
        fusing.left[name] = obstacle
        return
    residual, end, act = None, node, "none"
    total = _only_user(node)
    if total is not None and _is(total, SUMS, module) and _plain_sum(total):
        movable = total is node.next or _is_fresh(node.args[0], module)
        others = [n for n in total.all_input_nodes if n is not node]
        residual, end = (others[0], total) if movable else (None, node)
    place, after = end, _only_user(end)
    activation = None if after is None else _activation(after, module)
    if after is not None and activation is not None:
        if _hooked(after, module):
            fusing.left[name] = HOOKED
        else:
            act, end = activation, after
    if end is node:
        module_follows = after is not None and after.op == "call_module"
        if after is not None and module_follows and fusing.left.get(name) == ALONE:
            fusing.left[name] = not_fused(module.get_submodule(str(after.target)))
        return
    own = norm.own if isinstance(norm, FoldedConv2d) else "none"
    if own != "none" or (isinstance(norm, NormAct) and (act != "none" or norm.fused != "none")):
        fusing.left[name] = ACTIVATED
        return
    _replace(graph, node, place, end, residual, act)
    parts = ["sum"] * (residual is not None) + [act] * (act != "none")
    fusing.fused[name] = " and ".join(parts)
    fusing.left.pop(name, None)


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


def _norm_at(node: fx.Node, module: nn.Module) -> nn.Module | None:
    if node.op != "call_module" or len(node.args) != 1 or node.kwargs:
        return None
    called = module.get_submodule(str(node.target))
    return called if isinstance(called, HOSTS) else None


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _activation(node: fx.Node, module: nn.Module) -> str | None:
    """The name of the activation that a node is, if it is one."""
    if node.op == "call_module":
        name = name_of_module(module.get_submodule(str(node.target)))
        return None if name == "none" else name
    if node.op not in ("call_function", "call_method"):
        return None
    return name_of_call(node.target, node.args, node.kwargs)


def _is(node: fx.Node, kinds: tuple[Any, ...], module: nn.Module) -> bool:
    target: str | Callable[..., Any] | type = node.target
    if node.op == "call_module":
        target = type(module.get_submodule(str(node.target)))
    return node.op in ("call_function", "call_method", "call_module") and target in kinds


def _hooked(node: fx.Node, module: nn.Module) -> bool:
    return node.op == "call_module" and count_hooks(module.get_submodule(str(node.target))) > 0


def _plain_sum(node: fx.Node) -> bool:
    """Whether it adds two different nodes, and nothing else."""
    two = [a for a in node.args if isinstance(a, fx.Node)]
    return len(node.args) == 2 and len(two) == 2 and two[0] is not two[1] and not node.kwargs


# -------------------------------------------------------------------- tracing without a trace


def _traced(module: nn.Module) -> fx.Graph | str:
    """The graph of a forward that is the same in both modes and only computes; else why not."""
    name = type(module).__name__
    if "forward" in vars(module):
        return f"the forward of {name} was replaced on the instance"
    if len(inspect.signature(module.forward).parameters) != 1:
        # a second one may be None, to which a graph is blind
        return f"the forward of {name} takes other than one argument"
    modes = [m.training for m in module.modules()]
    before, buffers, lists = dict(vars(module)), dict(module._buffers), _lists(module)
    graphs = []
    try:
        for mode in (True, False):
            module.training = mode
            graphs.append(_ShallowTracer().trace(module))
    except Exception as error:  # whatever the forward does to a stand-in for a tensor
        return f"the forward of {name} cannot be traced ({type(error).__name__})"
    finally:
        for m, mode in zip(module.modules(), modes, strict=True):
            m.training = mode
        # a forward that keeps or counts something would no longer do so
        kept = _same(before, vars(module)) and _same(buffers, module._buffers)
        vars(module).clear()
        vars(module).update(before)
        module._buffers.clear()
        module._buffers.update(buffers)
        kept = _put_back(module, lists) and kept
    if not kept:
        return f"the forward of {name} keeps something on the module"
    if str(graphs[0]) != str(graphs[1]):
        return f"the forward of {name} is another one in eval mode"
    return graphs[0]


class _ShallowTracer(fx.Tracer):
    """Looks at one forward; whatever it calls stays a call."""

    proxy_buffer_attributes = True  # or a counter would count now, and never again

    def is_leaf_module(self, module: nn.Module, path: str) -> bool:
        return True


def _same(before: dict[str, Any], after: dict[str, Any]) -> bool:
    return before.keys() == after.keys() and all(after[name] is v for name, v in before.items())


def _lists(module: nn.Module) -> dict[str, list[Any]]:
    """What is in the lists of a module: a forward may collect its features there."""
    return {name: list(v) for name, v in vars(module).items() if isinstance(v, list)}


def _put_back(module: nn.Module, lists: dict[str, list[Any]]) -> bool:
    """Restore the lists; whether there was nothing to do."""
    now = _lists(module)
    changed = [name for name, then in lists.items() if [*map(id, then)] != [*map(id, now[name])]]
    for name in changed:
        vars(module)[name][:] = lists[name]
    return not changed
