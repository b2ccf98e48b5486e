"""The output of a model and of its norms, before and after a conversion."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map_only

from normkit.conversion.differing import difference, leaves
from normkit.conversion.full_precision import full_precision
from normkit.conversion.probing import Probe
from normkit.conversion.replacing import ReplaceModule
from normkit.conversion.trial import numbers
from normkit.inspection import channels_of, undisturbed
from normkit.layers.norm_act import NormAct

Tensors = dict[str, Tensor]
Hook = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]
NUDGE = 2**-20  # a few units in the last place of a float32


class LayerFailed(Exception):
    """A new layer cannot take the input that the old one got."""


@dataclass
class Before:
    """What the old model gave for a probe, and how much each new layer differs from the old."""

    probe: Probe
    output: list[Tensor] = field(default_factory=list)
    layers: dict[str, float] = field(default_factory=dict)
    unreached: list[str] = field(default_factory=list)


@dataclass
class After:
    """How the new model compares."""

    difference: float | None
    """None: there was nothing to compare."""
    stale: tuple[str, ...]
    """Old layers that are still called."""
    sensitivity: float | None = None
    """How much the output changes with the last digits of the input, where that was asked."""


def measure_before(
    model: nn.Module, edits: Sequence[ReplaceModule], finals: Sequence[Tensors], probe: Probe
) -> Before:
    """Run the old model; whatever comes to an old layer is shown to the new one too.

    ``finals`` are the tensors that the new layers will have when all edits are done. Layers that
    the model does not call for this input are compared on random numbers.
    """
    found = Before(probe)
    pairs = list(zip(edits, finals, strict=True))
    with ExitStack() as stack:
        for edit, final in pairs:
            assert edit.old is not None
            hook = _comparing(edit, final, found.layers)
            handle = edit.old.register_forward_pre_hook(hook, with_kwargs=True)
            stack.callback(handle.remove)
        stack.enter_context(undisturbed(model))
        stack.enter_context(undisturbed(nn.ModuleList(edit.new for edit in edits)))
        stack.enter_context(full_precision(model))
        found.output = [t.detach().clone() for t in leaves(probe.run(model))]
        for edit, final in pairs:
            path, old = edit.paths[0], edit.old
            if path not in found.layers and old is not None:
                found.unreached.append(path)
                _compare_on_numbers(old, _comparing(edit, final, found.layers))
    return found


def measure_after(model: nn.Module, edits: Sequence[ReplaceModule], before: Before) -> After:
    """Run the new model on the same probe."""
    stale: dict[str, None] = {}

    def watching(edit: ReplaceModule) -> Hook:
        def watch(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if module is edit.old:
                stale[edit.paths[0]] = None

        return watch

    with ExitStack() as stack:
        for edit in edits:  # old and new module have one dictionary of hooks
            hook = edit.new.register_forward_pre_hook(watching(edit), with_kwargs=True)
            stack.callback(hook.remove)
        stack.enter_context(undisturbed(model))
        stack.enter_context(full_precision(model))
        output = leaves(before.probe.run(model))
    found = difference(before.output, output) if before.output or output else None
    return After(found, tuple(stale))


def measure_sensitivity(model: nn.Module, probe: Probe) -> float:
    """How much the output of a model changes with the last digits of its input."""

    def nudged(tensor: Tensor) -> Tensor:
        return tensor * (1 + NUDGE) if tensor.is_floating_point() else tensor

    with undisturbed(model), full_precision(model):
        first = [t.clone() for t in leaves(probe.run(model))]
        other = Probe(tree_map_only(Tensor, nudged, probe.example), probe.text)
        return difference(first, leaves(other.run(model)))


def _comparing(edit: ReplaceModule, final: Tensors, layers: dict[str, float]) -> Hook:
    """A hook that shows the input of the old layer to the new one, and notes the difference."""
    path = edit.paths[0]

    def compare(old: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        was = old.forward(*_copied(args), **_copied(kwargs))  # without the hooks
        try:
            now = functional_call(edit.new, final, _copied(args), _copied(kwargs))
        except Exception as error:
            raise LayerFailed(f"{path}: {error}") from error
        layers[path] = max(layers.get(path, 0.0), difference(leaves(was), leaves(now)))

    return compare


def _compare_on_numbers(old: nn.Module, compare: Hook) -> None:
    norm = old.norm if isinstance(old, NormAct) else old
    like = next((t for t in (*old.parameters(), *old.buffers()) if t.is_floating_point()), None)
    channels = channels_of(norm)
    if channels is None:
        return
    for rank in (2, 1, 3):
        x = numbers(channels, rank, torch.empty(0, device="cpu") if like is None else like)
        try:
            compare(old, (x,), {})
            return
        except Exception:  # another rank may fit; if none does, the layer stays unmeasured
            continue


def _copied(arguments: Any) -> Any:
    """Copies of the tensors: a layer may work in place."""
    return tree_map_only(Tensor, torch.clone, arguments)
