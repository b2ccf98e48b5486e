"""Another forward for one module, which stays the same object.

The class of the module becomes a subclass with that forward, as ``marks`` does for freezing: hooks,
tensors, methods and what others hold stay what they were, and copies and pickles have it too.
"""

from __future__ import annotations

import importlib
import linecache
from types import ModuleType
from typing import Any

from torch import fx, nn

Names = tuple[tuple[str, Any], ...]
_classes: dict[tuple[type, str], type] = {}  # by the class before, and the source of the forward


class Fused(nn.Module):
    """What comes before the module's own class."""

    fused_source: str
    fused_names: Names
    unfused_class: type

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # pickle finds classes by name, and this one has none
        made: Any = super().__reduce_ex__(max(int(protocol), 2))
        _, _, *state = made
        return (_blank, (self.unfused_class, self.fused_source, self.fused_names), *state)


def use_graph(module: nn.Module, graph: fx.Graph) -> None:
    """Let a module compute the graph from now on."""
    code = graph.python_code("self")
    names = tuple((name, _portable(value)) for name, value in code.globals.items())
    module.__class__ = _fused_class(type(module), code.src, names)


def _fused_class(plain: type, source: str, names: Names) -> Any:
    if (plain, source) not in _classes:
        scope = {name: _loaded(value) for name, value in names}
        name = f"<fused forward {len(_classes)} of {plain.__name__}>"
        # so that tracebacks show the lines
        linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
        exec(compile(source, name, "exec"), scope)
        own = {
            "forward": scope["forward"],
            "fused_source": source,
            "fused_names": names,
            "unfused_class": plain,
            "__module__": plain.__module__,
            "__qualname__": plain.__qualname__,
            "__doc__": plain.__doc__,
        }
        _classes[plain, source] = type(plain.__name__, (Fused, plain), own)
    return _classes[plain, source]


def _blank(plain: type, source: str, names: Names) -> Any:
    """A module without contents, which copy and pickle fill."""
    made = _fused_class(plain, source, names)
    return made.__new__(made)


class _Named:
    """A module of Python by its name: pickle does not take modules."""

    def __init__(self, name: str) -> None:
        self.name = name


def _portable(value: Any) -> Any:
    return _Named(value.__name__) if isinstance(value, ModuleType) else value


def _loaded(value: Any) -> Any:
    return importlib.import_module(value.name) if isinstance(value, _Named) else value
