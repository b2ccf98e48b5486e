"""What feeds a norm and what follows it, seen while the model runs."""

from __future__ import annotations

from contextlib import ExitStack
from itertools import chain
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from normkit.inspection.calling import run
from normkit.inspection.flow import Neighbours, out_channels
from normkit.inspection.kinds import is_activation
from normkit.inspection.quiet import refuse_lazy, undisturbed, version
from normkit.inspection.tree import Node

SUMS = ("add", "add_", "__add__", "__radd__", "__iadd__")
FUNCTIONS = (
    *("relu", "relu6", "leaky_relu", "prelu", "rrelu", "elu", "selu", "celu", "gelu", "silu"),
    *("mish", "hardswish", "hardtanh", "hardsigmoid", "softplus", "sigmoid", "tanh"),
)


def observed(tree: Node, example: Any) -> Neighbours:
    """Neighbours in one run of the model in eval mode, which leaves no trace.

    A norm is fed by a layer whose very output it got, not changed in place on the way. It is
    followed by the activation that got its output, or a sum with it as at the end of a residual
    block: by the path of a module, or by the name of a function.
    """
    refuse_lazy(tree.module)
    watch = _Watch()
    with ExitStack() as stack:
        for node in tree.walk():
            for handle in watch.hooks(node):
                stack.callback(handle.remove)
        with undisturbed(tree.module), watch:
            try:
                run(tree.module, example)
            except Exception as error:
                error.add_note("normkit ran the model on the example to see which layers meet.")
                raise
    return {n.path: (watch.fed.get(n.path), watch.followed.get(n.path)) for n in tree.norms()}


class _Watch(TorchFunctionMode):
    """Follows tensors from layers to norms, and from norms through sums to activations."""

    def __init__(self) -> None:
        super().__init__()
        self.fed: dict[str, str] = {}
        self.followed: dict[str, str] = {}
        # weak: activations are to be freed as ever
        self.made: Any = WeakIdKeyDictionary()  # tensor -> its layer and version
        self.normed: Any = WeakIdKeyDictionary()  # tensor -> its norms and version

    def hooks(self, node: Node) -> list[Any]:
        """Registers what is to be seen of a module; returns the handles."""
        module, path = node.module, node.path
        if node.is_norm:
            before = module.register_forward_pre_hook(
                lambda _, args, kwargs: self._fed(path, args, kwargs), with_kwargs=True
            )
            after = module.register_forward_hook(lambda *call: self._keep((path,), call[-1]))
            return [before, after]
        if out_channels(module) is not None:
            return [module.register_forward_hook(lambda *call: self._make(path, call[-1]))]
        if is_activation(module):
            return [module.register_forward_pre_hook(lambda _, args: self._follow(path, args))]
        return []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name.rstrip("_") in FUNCTIONS:
            self._follow(name.rstrip("_"), args)
        norms = [p for x in args if name in SUMS for p in self._norms(x)]
        result = func(*args, **(kwargs or {}))
        if norms:
            self._keep(tuple(norms), result)
        return result

    def _make(self, path: str, output: Any) -> None:
        if isinstance(output, Tensor):
            self.made[output] = path, version(output)

    def _fed(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = next(chain(args, kwargs.values()), None)
        if isinstance(x, Tensor) and x in self.made:
            maker, then = self.made[x]
            if version(x) == then:
                self.fed.setdefault(path, maker)

    def _keep(self, paths: tuple[str, ...], output: Any) -> None:
        if isinstance(output, Tensor):
            self.normed[output] = paths, version(output)

    def _norms(self, x: Any) -> tuple[str, ...]:
        """The norms whose output a tensor is, or is a sum with."""
        if not isinstance(x, Tensor) or x not in self.normed:
            return ()
        paths, then = self.normed[x]
        return paths if version(x) == then else ()

    def _follow(self, act: str, args: tuple[Any, ...]) -> None:
        for path in self._norms(args[0]) if args else ():
            self.followed.setdefault(path, act)
