"""Which layers feed one norm and nothing else, seen while a model runs."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from normkit.conversion.probing import Probe
from normkit.inspection.quiet import undisturbed, version

# what turns a tensor into numbers of Python; all else that gives no tensor asks for its form
READERS = {"item", "tolist", "numpy", "__array__", "__float__", "__int__", "__bool__"}


@dataclass
class Meeting:
    """What one norm was given."""

    feeders: set[str | None] = field(default_factory=set)  # paths; None for anything else
    axes: set[int] = field(default_factory=set)  # of its input
    more: bool = False  # it got more than its input, as a residual


def watch(
    model: nn.Module, layers: Mapping[str, nn.Module], norms: Mapping[str, nn.Module], probe: Probe
) -> tuple[dict[str, Meeting], dict[str, set[str]]]:
    """By path, what each norm was given; and by path, who used the output of each layer.

    The model runs once in eval mode and is left as it was. Layers and norms that it does not
    call are missing from the answer.
    """
    traffic = _Traffic()
    with ExitStack() as stack:
        for path, layer in layers.items():
            stack.callback(layer.register_forward_hook(traffic.made_by(path)).remove)
        for path, norm in norms.items():
            come, go = traffic.around(path)
            stack.callback(norm.register_forward_pre_hook(come, with_kwargs=True).remove)
            stack.callback(norm.register_forward_hook(go, always_call=True).remove)
        with undisturbed(model), traffic:
            traffic.end(probe.run(model))
    for path, _ in traffic.makers.values():  # still alive: someone keeps it
        traffic.users[path].add("what keeps it after the run")
    return traffic.meetings, traffic.users


class _Traffic(TorchFunctionMode):
    """Sees every call of torch. Inside of norms it does not look: their input is theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.meetings: dict[str, Meeting] = {}
        self.users: dict[str, set[str]] = {}
        self.makers: Any = WeakIdKeyDictionary()  # tensor -> path of its layer, version
        self.inside = 0

    def made_by(self, path: str) -> Any:
        def after(layer: nn.Module, args: Any, output: Any) -> None:
            self.users.setdefault(path, set())
            if isinstance(output, Tensor):
                self.makers[output] = path, version(output)

        return after

    def around(self, path: str) -> tuple[Any, Any]:
        def come(norm: nn.Module, args: Any, kwargs: Any) -> None:
            self.inside += 1
            given = [x for x in chain(args, kwargs.values()) if x is not None]
            x = given[0] if given else None
            meeting = self.meetings.setdefault(path, Meeting())
            meeting.feeders.add(self.use(x, path))
            meeting.axes.add(x.dim() if isinstance(x, Tensor) else 0)
            meeting.more |= len(given) > 1

        def go(norm: nn.Module, args: Any, output: Any) -> None:
            self.inside -= 1

        return come, go

    def end(self, output: Any) -> None:
        for x in tree_leaves(output):
            self.use(x, "the model's output")

    def use(self, x: Any, user: str) -> str | None:
        """Note that a layer's output was used; returns the path of the layer, if it is one's."""
        if not isinstance(x, Tensor) or x not in self.makers:
            return None
        path, then = self.makers[x]
        self.users[path].add(user if version(x) == then else "a change in place")
        return path

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.inside:
            name = getattr(func, "__name__", str(func))
            if name in READERS or any(isinstance(t, Tensor) for t in tree_leaves(result)):
                for x in tree_leaves((args, kwargs)):
                    self.use(x, name)
        return result
