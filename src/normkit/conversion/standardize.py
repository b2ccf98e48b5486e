"""Weight standardization and its kin on a whole model, and back to plain weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.hooks import RemovableHandle

from normkit.catalog import ENTRIES, meant, names, suggestion
from normkit.conversion.edits import NONE, Edit, Modules, Successor, check_all, do_all
from normkit.errors import NormkitError, NothingToDo, OptionError, UnknownName, nearest
from normkit.inspection import convolutions_before_norms, refuse_wrapped
from normkit.inspection.flow import CONVOLUTIONS
from normkit.layers.together import Together
from normkit.layers.weight import WeightNormalizer, fan_in, normalized_tensors

METHODS: dict[str, type[WeightNormalizer]] = {name: ENTRIES[name] for name in names("weight")}
USUAL = next(name for name, method in METHODS.items() if method.computed_together)
SELF_MADE = ("StdConv", "ConvWS", "ConvAWS", "WSConv")  # in the names of classes that do it alone


def standardize(
    model: nn.Module,
    method: str = USUAL,
    *,
    example: Any = None,
    paths: Iterable[str] | None = None,
    **options: Any,
) -> list[str]:
    """Normalize the weight of every convolution that feeds a norm; returns their paths.

    ``method`` is "ws", "wn" or "cwn", with the options of that class. With an example input the
    convolutions are found by following the tensors, otherwise by the order of registration: see
    ``convolutions_before_norms``. ``paths`` names the convolutions instead.

    Left alone: convolutions with one weight per output channel, those whose weight is
    parametrized, pruned or standardized by the class itself (a second call changes nothing), and
    transposed ones. Either all others are changed or, on an error, none.

    ws and cwn change what a trained model computes, since running statistics belong to the old
    weights: train on, or estimate the statistics anew. wn and cwn bring new parameters: make the
    optimizer afterwards.

    >>> import torch, normkit as nk
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.GroupNorm(4, 8))
    >>> nk.standardize(model)
    ['0']
    >>> nk.fold_weights(model)
    ['0']
    """
    _method(method, options)
    if paths is not None:
        feeding = _named(model, paths)
    else:
        feeding = list(convolutions_before_norms(model, example))
    if not feeding:
        raise NothingToDo(
            "standardize found no convolution that feeds a norm. "
            + ("Linear layers and transposed convolutions do not count." if example is not None
               else "Try example=x with an input of the model, which follows the tensors.")
        )  # fmt: skip
    convolutions = {path: model.get_submodule(path) for path in feeding}
    plain = {path: conv for path, conv in convolutions.items() if is_plain(conv)}
    wide = {path: conv for path, conv in plain.items() if standardizable(conv)}
    if plain and not wide and len(plain) == len(convolutions):
        raise NothingToDo(
            "standardize found only convolutions with one weight per output channel "
            f"({', '.join(plain)}), which have no statistics."
        )
    refuse_shared(model, wide)
    edits = standardizing(wide, method, **options)
    check_all(model, edits)  # all, before the first is changed
    do_all(model, edits)
    return list(wide)


def _named(model: nn.Module, paths: Iterable[str]) -> list[str]:
    """These convolutions of the model, if they are some."""
    if isinstance(paths, str):
        raise OptionError(f"standardize expects paths as a list, got {paths!r}. Try [{paths!r}].")
    known = [path for path, m in model.named_modules() if isinstance(m, CONVOLUTIONS)]
    paths = list(paths)
    for path in paths:
        if path not in known:
            raise OptionError(f"There is no convolution {path!r}. {nearest(str(path), known)}")
    return paths


def standardizing(paths: Iterable[str], method: str = USUAL, **options: Any) -> list[Edit]:
    """The edits that normalize the weights of these convolutions."""
    paths = list(paths)
    edits: list[Edit] = [Standardize(path, method, **options) for path in paths]
    if _method(method, options).computed_together and len(paths) > 1:
        edits.append(ComputeTogether(paths))
    return edits


def fold_weights(model: nn.Module) -> list[str]:
    """Make every weight that ``standardize`` computes a plain one again; returns the paths.

    The model computes the same as before, faster, and can be pickled, scripted and exported.
    What is trained afterwards is no longer standardized.
    """
    refuse_wrapped(model)
    # all are checked before the first is changed
    modules = {path: module for path, module in model.named_modules() if normalized_tensors(module)}
    if not modules:
        raise NothingToDo("fold_weights found no weight that normkit normalizes.")
    for module in modules.values():
        WeightNormalizer.fold(module)
    Together.detach(model)
    return list(modules)


def is_plain(conv: nn.Module) -> bool:
    """Whether the weight is a parameter like any other, which nothing computes."""
    own = any(mark in type(conv).__name__ for mark in SELF_MADE)
    return isinstance(conv._parameters.get("weight"), Tensor) and not own


def standardizable(conv: nn.Module) -> bool:
    """Whether the weight is plain, and has several numbers for each output channel."""
    return is_plain(conv) and fan_in(conv.weight) > 1  # type: ignore[arg-type]


def refuse_shared(model: nn.Module, convolutions: Mapping[str, nn.Module]) -> None:
    """An error for a weight that another module has too: it could not stay shared."""
    owners = Counter(id(p) for module in model.modules() for p in module._parameters.values())
    for path, conv in convolutions.items():
        if owners[id(conv.weight)] > 1:
            raise OptionError(
                f"standardize cannot keep the weight of {path} shared with another module. "
                "Try to share the whole module instead."
            )


def _method(method: str, options: dict[str, Any]) -> type[WeightNormalizer]:
    """The class of that name, once it is known to have the options."""
    name = meant(method, METHODS)
    if name is None:
        raise UnknownName(f"standardize knows no method {method!r}. {suggestion(method, METHODS)}")
    kind = METHODS[name]
    # device and type are those of each weight
    own = [name for name in kind.options() if name not in ("device", "dtype")]
    for name in options:
        if name not in own:
            hint = nearest(name, own) if own else "It has none."
            raise OptionError(f"{kind.__name__} has no option {name!r}. {hint}")
    return kind


# -------------------------------------------------------------------- the edits


class Standardize(Edit):
    """Compute the weight of a convolution by "ws", "wn" or "cwn" from now on."""

    def __init__(self, path: str, method: str = USUAL, **options: Any) -> None:
        self.path, self.kind, self.options = path, _method(method, options), options
        self.description = f"the weight of {path} is computed by {self.kind.__name__}"
        self._normalizer: WeightNormalizer | None = None
        self._before: tuple[nn.Module, type, dict[str, Any], dict[str, Any]] | None = None

    def check(self, model: nn.Module, new: Modules = NONE) -> None:
        conv = model.get_submodule(self.path)
        try:
            self._normalizer = self.kind.fitting(conv, **self.options)
        except NormkitError as error:
            raise type(error)(f"{self.path}: {error}") from error

    @property
    def normalizer(self) -> WeightNormalizer:
        """What will compute the weight; ``check`` makes it."""
        assert self._normalizer is not None
        return self._normalizer

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
