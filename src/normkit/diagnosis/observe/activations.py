"""What comes out of the activation after a norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from normkit.diagnosis.measures import ActivityBounds
from normkit.inspection import Site

# by name, in lower case: how far the output reaches; those that are 0, or nearly, below 0
BOUNDS = {
    "relu": ActivityBounds(0.0, None),
    "relu6": ActivityBounds(0.0, 6.0),
    "sigmoid": ActivityBounds(0.0, 1.0),
    "hardsigmoid": ActivityBounds(0.0, 1.0),
    "tanh": ActivityBounds(-1.0, 1.0),
    "hardtanh": ActivityBounds(-1.0, 1.0),
}
CLOSES = ("relu", "relu6", "silu", "swish", "gelu", "mish", "hardswish", "hardmish")

Listener = Callable[[Tensor], None]


def name_of(act: nn.Module | str) -> str:
    """The name of an activation, without what libraries put around it: "gelutanh" is a gelu."""
    name = act if isinstance(act, str) else type(act).__name__
    name = name.lower().replace("_", "").removesuffix("me")  # timm's memory-efficient forms
    longest_first = sorted({*BOUNDS, *CLOSES}, key=len, reverse=True)
    return next((word for word in longest_first if name.startswith(word)), name)


def bounds_of(act: nn.Module | str) -> ActivityBounds:
    """Between which values the output of an activation lies."""
    if isinstance(act, nn.Hardtanh) and not isinstance(act, nn.ReLU6):
        return ActivityBounds(float(act.min_val), float(act.max_val))
    return BOUNDS.get(name_of(act), ActivityBounds())


def closes(act: nn.Module | str) -> bool:
    """Whether values below 0 are lost, or nearly: then a channel can be dead."""
    return name_of(act) in CLOSES


class AfterActivation:
    """Hands the output of the activation after each norm to whoever asked for that norm.

    A module that serves several norms, as the one ReLU of a residual block does, is told apart by
    whose output it gets; what is no norm's own output is the sum of a block, and belongs to all
    norms that have run since and wait for that module. An activation that is called as a function
    is not seen: a norm's own output tells of it, except before a sum.
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules = dict(model.named_modules())
        self.waiting: dict[str, dict[str, Tensor]] = {}  # by activation: norms and their outputs
        self.listeners: dict[str, Listener] = {}
        self.met: list[str] = []  # norms whose activation is running

    def of(self, site: Site) -> nn.Module | str | None:
        """The activation that follows a norm; its name if it is no module."""
        return site.act or self.modules.get(site.followed_by or "", site.followed_by)

    def listen(self, site: Site, listener: Listener) -> list[RemovableHandle]:
        """Hooks that hand on what follows a norm; none if nothing is known to follow."""
        act = site.followed_by
        if site.act is not None or (act is not None and act not in self.modules):
            if site.act is None and (site.last_in_block or site.shortcut):
                return []
            return [site.module.register_forward_hook(lambda *call: _hand(listener, call[-1]))]
        if act is None:
            return []
        self.listeners[site.path] = listener
        handles = [
            site.module.register_forward_hook(lambda *call: self._wait(act, site.path, call[-1]))
        ]
        if act not in self.waiting:
            self.waiting[act] = {}
            module = self.modules[act]
            # before: an activation in place leaves nothing to recognise
            handles.append(module.register_forward_pre_hook(lambda _, args: self._meet(act, args)))
            handles.append(module.register_forward_hook(lambda *call: self._done(act, call[-1])))
        return handles

    def _wait(self, act: str, path: str, output: Any) -> None:
        if isinstance(output, Tensor):
            self.waiting[act][path] = output

    def _meet(self, act: str, args: tuple[Any, ...]) -> None:
        """Find those norms whose output, or a sum with it, came."""
        x = args[0] if args else None
        waiting = self.waiting[act]
        own = [path for path, output in waiting.items() if output is x]
        self.met = own or list(waiting)

    def _done(self, act: str, output: Any) -> None:
        for path in self.met:
            self.waiting[act].pop(path, None)
            _hand(self.listeners[path], output)
        self.met = []


def _hand(listener: Listener, output: Any) -> None:
    if isinstance(output, Tensor):
        listener(output)
