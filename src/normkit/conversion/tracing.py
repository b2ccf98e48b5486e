"""The forward of one module as a graph, if it can be seen as one without a trace in the module."""

from __future__ import annotations

import inspect
from typing import Any

from torch import fx, nn


def traced(module: nn.Module) -> fx.Graph | None:
    """The graph of a forward that is the same in both modes and only computes; else None."""
    if "forward" in vars(module) or not _takes_one(module):
        return None
    modes = [m.training for m in module.modules()]
    before, buffers, inside = dict(vars(module)), dict(module._buffers), _inside(module)
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
        # a forward that keeps or counts something would no longer do so
        kept = _same(before, vars(module)) and _same(buffers, module._buffers)
        vars(module).clear()
        vars(module).update(before)
        module._buffers.clear()
        module._buffers.update(buffers)
        kept = _put_back(module, inside) and kept
    return graphs[0] if kept and str(graphs[0]) == str(graphs[1]) else None


def _takes_one(module: nn.Module) -> bool:
    """Whether forward has one argument: a second may be None, to which a graph is blind."""
    return len(inspect.signature(module.forward).parameters) == 1


class _Shallow(fx.Tracer):
    """Looks at one forward; whatever it calls stays a call."""

    proxy_buffer_attributes = True  # or a counter would count now, and never again

    def is_leaf_module(self, module: nn.Module, path: str) -> bool:
        return True


def _same(before: dict[str, Any], after: dict[str, Any]) -> bool:
    return before.keys() == after.keys() and all(after[name] is v for name, v in before.items())


def _inside(module: nn.Module) -> dict[str, list[Any]]:
    """What is in the lists of a module: a forward may collect its features there."""
    return {name: list(v) for name, v in vars(module).items() if isinstance(v, list)}


def _put_back(module: nn.Module, inside: dict[str, list[Any]]) -> bool:
    """Restore the lists; whether there was nothing to do."""
    now = _inside(module)
    changed = [name for name, then in inside.items() if [*map(id, then)] != [*map(id, now[name])]]
    for name in changed:
        vars(module)[name][:] = inside[name]
    return not changed
