"""What is in a model: which convolution feeds which norm."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from normkit.errors import OptionError, ShapeError
from normkit.layers.base import Normalizer

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm)  # batch, sync and instance norms; groups
# class -> where the model is that it wraps; by name, for importing the compiler takes seconds
WRAPPERS = {
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "module",
    "OptimizedModule": "_orig_mod",
}


def convolutions_before_norms(model: nn.Module, example: Any = None) -> dict[str, str]:
    """The path of every convolution whose output goes straight into a norm, and of that norm.

    With an example input (a tensor, a tuple of positional or a mapping of keyword arguments) the
    model is run once in eval mode and the answer is exact for what that run does: the norm got
    the very tensor the convolution returned, not changed in place on the way. The model is
    afterwards what it was, bit for bit; so are torch's random numbers.

    Without, a convolution counts if the next child of the same parent, in the order of
    registration, is a norm with as many channels: right for most networks, but a guess.

    Norms are torch.nn's batch, sync, instance and group norms, those of normkit, and modules with
    "Norm" in their class name and a channel count that matches. Transposed convolutions do not
    count: their weights are laid out in another way.
    """
    refuse_wrapped(model)
    lazy = (nn.UninitializedParameter, nn.UninitializedBuffer)
    if any(isinstance(t, lazy) for t in chain(model.parameters(), model.buffers())):
        raise ShapeError("The model has lazy layers. Run one batch through it first.")
    paths = {module: path for path, module in model.named_modules()}
    pairs = _registered(model) if example is None else _observed(model, example)
    found: dict[str, str] = {}
    for convolution, norm in pairs:
        if channels_of(norm) == convolution.out_channels:
            found.setdefault(paths[convolution], paths[norm])
    return found


def channels_of(module: nn.Module) -> int | None:
    """How many channels a norm has; None for what is no norm."""
    if isinstance(module, Normalizer):
        return module.channels
    # a block such as ConvNormAct is not a norm, whatever its name
    named = "Norm" in type(module).__name__ and not any(map(_is_convolution, module.modules()))
    if not (named or isinstance(module, NORMS)):
        return None
    for name in ("num_features", "num_channels", "channels"):
        if isinstance(channels := getattr(module, name, None), int):
            return channels
    if shape := getattr(module, "normalized_shape", None):
        return shape[0]
    weight = getattr(module, "weight", None)
    return weight.shape[0] if isinstance(weight, Tensor) and weight.dim() == 1 else None


def refuse_wrapped(model: nn.Module) -> None:
    """An error for a model inside a wrapper that has taken note of its parameters or its code."""
    for path, module in model.named_modules():
        for kind in type(module).__mro__:
            if kind.__name__ in WRAPPERS:
                inner = ".".join(filter(None, ("model", path, WRAPPERS[kind.__name__])))
                raise OptionError(
                    f"The model is wrapped in {kind.__name__}, which would not notice a change. "
                    f"Try {inner}, and wrap or compile it again afterwards."
                )


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Eval mode without gradients inside; outside nothing has happened, even after an error.

    Restores the mode of each module, the buffers and torch's random states bit for bit. The modes
    are set as attributes: a ``train`` method that does more must not run.
    """
    modules = list(model.modules())
    modes = [module.training for module in modules]
    buffers = [dict(module._buffers) for module in modules]
    tensors = [t for t in model.buffers() if not t.is_meta]
    values = [(t, t.detach().clone(), _version(t)) for t in tensors]
    devices = {t.device for t in chain(model.parameters(), model.buffers())}
    with ExitStack() as stack:
        for kind in {d.type for d in devices if d.type in ("cuda", "xpu")} or {"cuda"}:
            ours = [d.index for d in devices if d.type == kind]  # none: the CPU's state alone
            stack.enter_context(torch.random.fork_rng(ours, device_type=kind))
        stack.enter_context(torch.inference_mode(False))  # its tensors do not count their changes
        stack.enter_context(torch.no_grad())
        try:
            for module in modules:
                module.training = False
            yield
        finally:
            for module, mode, kept in zip(modules, modes, buffers, strict=True):
                module.training = mode
                module._buffers.clear()
                module._buffers.update(kept)
            for tensor, value, version in values:
                if _version(tensor) != version or not torch.equal(tensor, value):
                    tensor.copy_(value)


def _registered(model: nn.Module) -> Iterator[tuple[Any, nn.Module]]:
    """Neighbours among the children of a module, if the first is a convolution."""
    for parent in model.modules():
        yield from ((a, b) for a, b in pairwise(parent.children()) if _is_convolution(a))


def _observed(model: nn.Module, example: Any) -> list[tuple[Any, nn.Module]]:
    """Convolutions and norms between which one tensor passed when the model ran."""
    pairs: list[tuple[Any, nn.Module]] = []
    made: Any = WeakIdKeyDictionary()  # weak: activations are to be freed as ever

    def after(module: nn.Module, args: Any, output: Tensor) -> None:
        made[output] = (module, _version(output))

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = next(chain(args, kwargs.values()), None)
        if isinstance(x, Tensor) and x in made:
            maker, version = made[x]
            if _version(x) == version:  # else something such as an in-place ReLU came between
                pairs.append((maker, module))

    with ExitStack() as stack:
        for module in model.modules():
            if _is_convolution(module):
                stack.callback(module.register_forward_hook(after).remove)
            elif channels_of(module) is not None:
                hook = module.register_forward_pre_hook(before, with_kwargs=True)
                stack.callback(hook.remove)
        with undisturbed(model):
            if isinstance(example, Mapping):
                model(**example)
            else:
                model(*example) if isinstance(example, tuple | list) else model(example)
    return pairs


def _is_convolution(module: nn.Module) -> bool:
    return isinstance(module, CONVOLUTIONS)


def _version(tensor: Tensor) -> int | None:
    """How often a tensor was changed in place; tensors of inference mode do not know."""
    return None if tensor.is_inference() else tensor._version
