"""Sums and activations that follow a norm, done in the norm's own pass over memory."""

from __future__ import annotations

import operator
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from normkit.errors import NothingToDo
from normkit.inspection import refuse_wrapped
from normkit.layers.base import Normalizer
from normkit.layers.norm_act import NormAct

SUMS: tuple[Any, ...] = (operator.add, operator.iadd, torch.add, "add", "add_")
ACTIVATIONS: dict[str, tuple[Any, ...]] = {
    "relu": (F.relu, torch.relu, torch.relu_, F.relu_, "relu", "relu_", nn.ReLU),
    "silu": (F.silu, nn.SiLU),
}


def fuse(model: nn.Module) -> nn.Module:
    """Let normkit's norms do the sum and the ReLU or SiLU that follow them.

    In ``relu(bn(x) + identity)`` the norm, the sum and the activation each read and write the whole
    map; a Normalizer does all three in one pass. This looks at the forward of every module that has
    norms of normkit among its children (torchvision's and timm's ResNet blocks, your own), and
    rewrites those in which a norm is followed by nothing but a sum, an activation, or both. Convert
    the model first: norms of other libraries are left alone.

    A rewritten module becomes a ``torch.fx.GraphModule`` with the same children, so state_dicts
    stay what they were; in a Sequential the norm becomes a NormAct, whose tensors are then named
    ``norm.…`` (older state_dicts still load), and the activation an Identity.
    A module whose forward cannot be traced, or is another one in eval mode, stays as it is.
    Changes the model in place and returns it, or a new outermost module if that one was rewritten.

    >>> import torch, normkit as nk
    >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), nk.BN(8), torch.nn.ReLU())
    >>> nk.fuse(net)
    Sequential(
      (0): Conv2d(3, 8, kernel_size=(3, 3), stride=(1, 1))
      (1): NormAct(
        (norm): BN(8)
        (drop): Identity()
        (act): ReLU()
      )
      (2): Identity()
    )
    """
    refuse_wrapped(model)
    if not any(isinstance(m, Normalizer) for m in model.modules()):
        raise NothingToDo(
            "fuse found no normalizer of normkit in the model. Try normkit.convert(model, 'bn')."
        )
    done: dict[nn.Module, nn.Module] = {}  # a module with two parents is rewritten once
    for module in list(model.modules())[::-1]:
        for name, child in module._modules.items():
            if child in done:
                module._modules[name] = done[child]
        rewritten = _rewritten(module)
        if rewritten is not module:
            done[module] = rewritten
    return done.get(model, model)


def _rewritten(module: nn.Module) -> nn.Module:
    if isinstance(module, nn.Sequential):
        return _fused_sequence(module)
    norms = [child for child in module.children() if isinstance(child, Normalizer | NormAct)]
    if not norms or isinstance(module, Normalizer | NormAct | fx.GraphModule):
        return module
    graph = _graph(module)
    if graph is None or not _fuse_graph(graph, module):
        return module
    found = fx.GraphModule(module, graph, type(module).__name__)
    for attribute, value in vars(module).items():  # what the forward does not use, but users may
        if attribute not in found.__dict__:
            found.__dict__[attribute] = value
    found._modules.clear()
    found._modules.update(module._modules)  # those the forward does not use too, in their order
    found.training = module.training
    return found


def _fused_sequence(module: nn.Sequential) -> nn.Sequential:
    children = list(module.named_children())
    for (name, norm), (after, act) in pairwise(children):
        known = next((a for a, kinds in ACTIVATIONS.items() if type(act) in kinds), None)
        if known and isinstance(norm, Normalizer):
            setattr(module, name, NormAct(norm, act).train(norm.training))
            setattr(module, after, nn.Identity().train(act.training))
    return module


class _Shallow(fx.Tracer):
    """Looks at one forward; whatever it calls stays a call."""

    def is_leaf_module(self, module: nn.Module, path: str) -> bool:
        return True


def _graph(module: nn.Module) -> fx.Graph | None:
    """The forward as a graph, if it is the same in both modes and can be seen as one."""
    modes = [m.training for m in module.modules()]
    graphs = []
    try:
        for mode in (True, False):
            module.training = mode
            graphs.append(_Shallow().trace(module))
    except Exception:  # whatever the forward does to a stand-in for a tensor
        return None
    finally:
        for m, mode in zip(module.modules(), modes, strict=True):
            m.training = mode
    return graphs[0] if str(graphs[0]) == str(graphs[1]) else None


def _fuse_graph(graph: fx.Graph, module: nn.Module) -> bool:
    """Let every norm take over what follows it; whether there was anything."""
    changed = False
    for node in list(graph.nodes):
        norm = _norm_of(node, module)
        if norm is None:
            continue
        residual, last, act = None, node, "none"
        total = _only_user(node)
        if total is not None and _is(total, SUMS, module) and _plain_sum(total):
            (residual,) = [n for n in total.all_input_nodes if n is not node]
            last = total
        after = _only_user(last)
        for name, kinds in ACTIVATIONS.items():
            if after is not None and _is(after, kinds, module):
                act, last = name, after
        if last is node:
            continue
        if isinstance(norm, NormAct) and (act != "none" or norm.fused != "none"):
            continue  # it has an activation of its own, before the sum
        with graph.inserting_before(last):
            x = node.args[0]
            args = (x, residual) if isinstance(norm, NormAct) else (x, residual, act)
            new = graph.call_module(node.target, args)
        last.replace_all_uses_with(new)
        graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))
        changed = True
    return changed


def _norm_of(node: fx.Node, module: nn.Module) -> nn.Module | None:
    if node.op != "call_module" or len(node.args) != 1 or node.kwargs:
        return None
    found = module.get_submodule(str(node.target))
    return found if isinstance(found, Normalizer | NormAct) else None


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _is(node: fx.Node, kinds: tuple[Any, ...], module: nn.Module) -> bool:
    target: str | Callable[..., Any] | type = node.target
    if node.op == "call_module":
        target = type(module.get_submodule(str(node.target)))
    return node.op in ("call_function", "call_method", "call_module") and target in kinds


def _plain_sum(node: fx.Node) -> bool:
    """Whether it adds two different nodes, and nothing else."""
    two = [a for a in node.args if isinstance(a, fx.Node)]
    return len(node.args) == 2 and len(two) == 2 and two[0] is not two[1] and not node.kwargs
