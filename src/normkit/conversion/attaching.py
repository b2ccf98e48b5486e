"""Weight standardization and its kin on one convolution, in a way that can be taken back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.nn.utils import parametrize
from torch.utils.hooks import RemovableHandle

from normkit.catalog import ENTRIES, names
from normkit.conversion.edit import Edit, Successor
from normkit.errors import NormkitError, OptionError, UnknownName, nearest
from normkit.layers.together import Together
from normkit.layers.weight import WeightNormalizer

METHODS: dict[str, type[WeightNormalizer]] = {name: ENTRIES[name] for name in names("weight")}


class Standardize(Edit):
    """Compute the weight of a convolution by "ws", "wn" or "cwn" from now on."""

    def __init__(self, path: str, method: str = "ws", **options: Any) -> None:
        self.path, self.kind, self.options = path, kind_of(method, options), options
        self.description = f"the weight of {path} is computed by {self.kind.__name__}"
        self._normalizer: WeightNormalizer | None = None
        self._before: tuple[nn.Module, type, dict[str, Any], dict[str, Any]] | None = None

    def check(self, model: nn.Module) -> None:
        conv = model.get_submodule(self.path)
        try:
            self._normalizer = self.kind.fitting(conv, **self.options)
        except NormkitError as error:
            raise type(error)(f"{self.path}: {error}") from error

    def do(self, model: nn.Module) -> None:
        if self._normalizer is None:
            self.check(model)
        assert self._normalizer is not None
        conv = model.get_submodule(self.path)
        self._before = conv, type(conv), dict(conv._parameters), dict(conv._modules)
        parametrize.register_parametrization(conv, "weight", self._normalizer)

    def undo(self, model: nn.Module) -> None:
        if self._before is None:
            return
        conv, its_class, parameters, modules = self._before
        conv.__class__ = its_class
        for current, kept in ((conv._parameters, parameters), (conv._modules, modules)):
            current.clear()
            current.update(kept)
        self._before = self._normalizer = None

    def successors(self) -> list[Successor]:
        if self._before is None:
            return []
        conv, _, before, _ = self._before
        held = {id(p) for p in before.values()}
        come = [p for p in conv.parameters() if id(p) not in held]
        return [Successor(p, before["weight"]) for p in come]


class ComputeTogether(Edit):
    """Compute the weights that ws standardizes in one launch, before each forward of the model."""

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = tuple(paths)
        self.description = f"{len(self.paths)} weights are computed together"
        self._handles: tuple[RemovableHandle, ...] = ()

    def do(self, model: nn.Module) -> None:
        convolutions = [model.get_submodule(path) for path in self.paths]
        self._handles = Together(convolutions).attach(model)

    def undo(self, model: nn.Module) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = ()


def kind_of(method: str, options: dict[str, Any]) -> type[WeightNormalizer]:
    """The class of that name, once it is known to have the options."""
    if method not in METHODS:
        raise UnknownName(f"standardize knows no method {method!r}. {nearest(method, METHODS)}")
    kind = METHODS[method]
    # device and type are those of each weight
    known = [name for name in kind.options() if name not in ("device", "dtype")]
    for name in options:
        if name not in known:
            hint = nearest(name, known) if known else "It has none."
            raise OptionError(f"{kind.__name__} has no option {name!r}. {hint}")
    return kind
