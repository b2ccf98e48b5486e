"""Weight standardization and its kin on a whole model, and back to plain weights."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor, nn

from normkit.conversion.attaching import ComputeTogether, Standardize, kind_of
from normkit.conversion.edit import Edit, do_all
from normkit.errors import NothingToDo, OptionError
from normkit.inspection import convolutions_before_norms, refuse_wrapped
from normkit.layers.together import Together
from normkit.layers.weight import WeightNormalizer, fan_in, normalized_tensors

SELF_MADE = ("StdConv", "ConvWS", "ConvAWS", "WSConv")  # in the names of classes that do it alone


def standardize(
    model: nn.Module, method: str = "ws", *, example: Any = None, **options: Any
) -> list[str]:
    """Normalize the weight of every convolution that feeds a norm; returns their paths.

    ``method`` is "ws", "wn" or "cwn", with the options of that class. With an example input the
    convolutions are found by following the tensors, otherwise by the order of registration: see
    ``convolutions_before_norms``.

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
    kind_of(method, options)
    found = convolutions_before_norms(model, example)
    if not found:
        raise NothingToDo(
            "standardize found no convolution that feeds a norm. "
            + ("Linear layers and transposed convolutions do not count." if example is not None
               else "Try example=x with an input of the model, which follows the tensors.")
        )  # fmt: skip
    convolutions = {path: model.get_submodule(path) for path in found}
    plain = {path: conv for path, conv in convolutions.items() if is_plain(conv)}
    wide = {path: conv for path, conv in plain.items() if fan_in(conv.weight) > 1}  # type: ignore[arg-type]
    if plain and not wide and len(plain) == len(convolutions):
        raise NothingToDo(
            "standardize found only convolutions with one weight per output channel "
            f"({', '.join(plain)}), which have no statistics."
        )
    refuse_shared(model, wide)
    planned: tuple[Edit, ...] = tuple(Standardize(path, method, **options) for path in wide)
    if method == "ws" and len(wide) > 1:
        planned = *planned, ComputeTogether(list(wide))
    for edit in planned:  # all are checked before the first is changed
        edit.check(model)
    do_all(model, planned)
    return list(wide)


def fold_weights(model: nn.Module) -> list[str]:
    """Make every weight that ``standardize`` computes a plain one again; returns the paths.

    The model computes the same as before, faster, and can be pickled, scripted and exported.
    What is trained afterwards is no longer standardized.
    """
    refuse_wrapped(model)
    # all are checked before the first is changed
    found = {path: module for path, module in model.named_modules() if normalized_tensors(module)}
    if not found:
        raise NothingToDo("fold_weights found no weight that normkit normalizes.")
    for module in found.values():
        WeightNormalizer.fold(module)
    Together.detach(model)
    return list(found)


def is_plain(conv: nn.Module) -> bool:
    """Whether the weight is a parameter like any other, which nothing computes."""
    own = any(mark in type(conv).__name__ for mark in SELF_MADE)
    return isinstance(conv._parameters.get("weight"), Tensor) and not own


def refuse_shared(model: nn.Module, convolutions: dict[str, nn.Module]) -> None:
    """An error for a weight that another module has too: it could not stay shared."""
    owners = Counter(id(p) for module in model.modules() for p in module._parameters.values())
    for path, conv in convolutions.items():
        if owners[id(conv.weight)] > 1:
            raise OptionError(
                f"standardize cannot keep the weight of {path} shared with another module. "
                "Try to share the whole module instead."
            )
