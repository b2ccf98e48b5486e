"""What is in a model: which convolution feeds which norm."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from itertools import chain, pairwise
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from normkit.inspection.calling import run
from normkit.inspection.facts import facts_of
from normkit.inspection.quiet import refuse_lazy, undisturbed, version
from normkit.inspection.wrappers import refuse_wrapped

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def convolutions_before_norms(model: nn.Module, example: Any = None) -> dict[str, str]:
    """The path of every convolution whose output goes straight into a norm, and of that norm.

    With an example input (a tensor, a tuple of positional or a mapping of keyword arguments) the
    model is run once in eval mode and the answer is exact for what that run does: the norm got
    the very tensor the convolution returned, not changed in place on the way. The model is
    afterwards what it was, bit for bit; so are torch's random numbers.

    Without, a convolution counts if the next child of the same parent, in the order of
    registration, is a norm with as many channels: right for most networks, but a guess.

    Norms are what ``survey`` lists, if their channel count matches. Transposed convolutions do
    not count: their weights are laid out in another way.
    """
    refuse_wrapped(model)
    refuse_lazy(model)
    paths = {module: path for path, module in model.named_modules()}
    pairs = _registered(model) if example is None else _observed(model, example)
    found: dict[str, str] = {}
    for convolution, norm in pairs:
        if channels_of(norm) == convolution.out_channels:
            found.setdefault(paths[convolution], paths[norm])
    return found


def channels_of(module: nn.Module) -> int | None:
    """How many channels a norm has; None for what is no norm."""
    channels: int | None = facts_of(module).get("channels")
    return channels


def _registered(model: nn.Module) -> Iterator[tuple[Any, nn.Module]]:
    """Neighbours among the children of a module, if the first is a convolution."""
    for parent in model.modules():
        yield from ((a, b) for a, b in pairwise(parent.children()) if _is_convolution(a))


def _observed(model: nn.Module, example: Any) -> list[tuple[Any, nn.Module]]:
    """Convolutions and norms between which one tensor passed when the model ran."""
    pairs: list[tuple[Any, nn.Module]] = []
    made: Any = WeakIdKeyDictionary()  # weak: activations are to be freed as ever

    def after(module: nn.Module, args: Any, output: Tensor) -> None:
        made[output] = (module, version(output))

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = next(chain(args, kwargs.values()), None)
        if isinstance(x, Tensor) and x in made:
            maker, then = made[x]
            if version(x) == then:  # else something such as an in-place ReLU came between
                pairs.append((maker, module))

    with ExitStack() as stack:
        for module in model.modules():
            if _is_convolution(module):
                stack.callback(module.register_forward_hook(after).remove)
            elif channels_of(module) is not None:
                hook = module.register_forward_pre_hook(before, with_kwargs=True)
                stack.callback(hook.remove)
        with undisturbed(model):
            run(model, example)
    return pairs


def _is_convolution(module: nn.Module) -> bool:
    return isinstance(module, CONVOLUTIONS)
