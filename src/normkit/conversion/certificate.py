"""What a conversion did to the output of a model, measured before and after."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map_only

from normkit.conversion.edits import Edit, ReplaceModule, final_tensors, replacements
from normkit.conversion.fit.report import FitReport
from normkit.conversion.forward_probe import (
    Probe,
    difference,
    full_precision,
    leaves,
    noise,
    not_finite,
    probes,
    rounding,
)
from normkit.core.messages import error_words
from normkit.errors import OptionError
from normkit.inspection import channels_of, undisturbed
from normkit.inspection.batches import samples_in
from normkit.layers.norm_act import NormAct

Hook = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]
NUDGE = 2**-20  # a few units in the last place of a float32
SIMILAR = 0.1  # a share that makes two differences alike
POSITIONS = 4  # along each spatial axis, of numbers that are made up
UNTOUCHED = "Nothing was changed."
NO_INPUT = "no input was given."
NO_NUMBERS = "the model gives no finite number"
ABOUT_SIZES = (RuntimeError, ValueError, AssertionError, IndexError)  # what a wrong size may raise


@dataclass(frozen=True)
class Certificate:
    """The evidence: every number in it was measured, in eval mode, before and after."""

    title: str
    converted: int
    """How many norms were replaced."""
    probe: str
    """The input that was used, or why there was none."""
    probed: bool
    dtype: str = ""
    """The number type of the output."""
    difference: float | None = None
    """Of the model's output: max |after − before| / max |before|; None if not measured."""
    inside: dict[str, float] = field(default_factory=dict)
    """Where outputs cannot be compared number by number, as boxes: the same measure of what the
    last part of the model gives that has one shape before and after, as a backbone its maps."""
    reshaped: bool = False
    """Whether the output has other shapes than before, as of a detector that finds other boxes."""
    layers: dict[str, float] = field(default_factory=dict)
    """Of each new layer, on the input that the old one got: the same measure."""
    unreached: tuple[str, ...] = ()
    """Converted layers that the model did not call; they were compared on random numbers."""
    tolerance: float = 0.0
    """What still counts as rounding."""
    notes: tuple[str, ...] = ()
    fit: FitReport | None = None
    """What a fit on images has come to, if there was one."""
    finite: bool = True
    """Whether every number of the output is finite that was so before."""
    rounding_is_enough: bool = False
    """Whether the last digits of the input change the output as much as the conversion did."""

    @property
    def exact(self) -> bool:
        """Whether the model and each layer gave the same as before but for rounding."""
        return self.probed and self.layers_exact and self._within(self.difference)

    @property
    def layers_exact(self) -> bool:
        """Whether each layer alone did, on the input that the old one got."""
        measured = self.probed and len(self.layers) == self.converted
        return measured and all(map(self._within, self.layers.values()))

    @property
    def contradicts_exactness(self) -> bool:
        """Whether something was measured that differs by more than rounding explains."""
        compared = self.difference is not None or self.reshaped
        unmeasured = self.layers_exact and (not compared or self.rounding_is_enough)
        return self.probed and not self.exact and not unmeasured

    @property
    def worst(self) -> tuple[str, float] | None:
        """The layer that differs most."""
        return max(self.layers.items(), key=lambda item: item[1], default=None)

    @property
    def note(self) -> str:
        return " ".join(self.notes)

    def _within(self, difference: float | None) -> bool:
        return difference is not None and difference <= self.tolerance

    @property
    def verdict(self) -> str:
        """One sentence."""
        if not self.probed:
            return f"Not measured: {self.probe.rstrip('.')}."
        if self.exact:
            return f"Exact to rounding: the output differs by {self.difference:.1e} relative."
        if not self.finite:
            return "The output is not finite any more: it was before."
        text = self._in_numbers()
        if not self.layers:
            return f"{text}."
        if self.layers_exact:
            return f"{text}, though each layer alone is exact to rounding."
        assert self.worst is not None
        return f"{text}; the layer that differs most is {self.worst[0]} ({self.worst[1]:.1e})."

    def _in_numbers(self) -> str:
        if self.difference is not None:
            return f"The output differs by {self.difference:.1e} relative"
        if not self.reshaped:
            return "The output has no numbers to compare"
        text = "The output has other shapes than before, as of a detector that finds other boxes"
        parts = [f", and what {path} gives differs by {x:.1e} relative" for path, x in
                 self.inside.items()]  # fmt: skip
        return text + "".join(parts)

    def __str__(self) -> str:
        lines = [f"{self.title}: {self.converted} norm(s) converted. {self.verdict}"]
        if self.probed:
            lines.append(f"Measured in eval mode with {self.probe}, {self.dtype}.")
        if self.unreached:
            lines.append(
                f"Not called for this input, and measured with random numbers: "
                f"{', '.join(self.unreached)}."
            )
        lines += [] if self.fit is None else [str(self.fit)]
        return "\n".join([*lines, *self.notes])

    def to_dict(self) -> dict[str, Any]:
        """Everything, in plain values; differences that are not finite become words."""
        return {
            "title": self.title,
            "converted": self.converted,
            "exact": self.exact,
            "verdict": self.verdict,
            "probed": self.probed,
            "probe": self.probe,
            "dtype": self.dtype,
            "difference": _plain(self.difference),
            "reshaped": self.reshaped,
            "inside": {path: _plain(value) for path, value in self.inside.items()},
            "tolerance": self.tolerance,
            "layers": {path: _plain(value) for path, value in self.layers.items()},
            "unreached": list(self.unreached),
            "finite": self.finite,
            "notes": list(self.notes),
            "fit": None if self.fit is None else self.fit.to_dict(),
        }

    def to_json(self, indent: int | None = 2) -> str:
        return json.dumps(self.to_dict(), indent=indent)


def _plain(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(value)


# -------------------------------------------------------------------- where to find it

_certificates: WeakKeyDictionary[nn.Module, list[Certificate]] = WeakKeyDictionary()


def certificates(model: nn.Module) -> tuple[Certificate, ...]:
    """What the conversions of a model have said, in their order, for whom has kept no plan.

    Those that were undone are gone. They belong to this object in this process: a copy of the
    model, by deepcopy or torch.save and torch.load, has none. Keep ``to_json()`` beside a file.

    >>> import torch, normkit as nk
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8))
    >>> model = nk.convert(model, "rbn")
    >>> [certificate.exact for certificate in nk.certificates(model)]
    [True]
    """
    return tuple(_certificates.get(model, ()))


def remember(model: nn.Module, certificate: Certificate) -> None:
    _certificates.setdefault(model, []).append(certificate)


def forget(model: nn.Module, certificate: Certificate) -> None:
    kept = [each for each in _certificates.get(model, ()) if each is not certificate]
    _certificates[model] = kept


# -------------------------------------------------------------------- measuring


class LayerFailed(Exception):
    """A new layer cannot take the input that the old one got."""


@dataclass
class Before:
    """What the old model gave for a probe, and how much each new layer differs from the old."""

    probe: Probe
    output: list[Tensor] = field(default_factory=list)
    layers: dict[str, float] = field(default_factory=dict)
    unreached: list[str] = field(default_factory=list)
    samples: dict[str, int] = field(default_factory=dict)
    """How many samples a layer got, where that is not the number that the model got."""
    inside: dict[str, list[Tensor]] = field(default_factory=dict)
    """What the parts of a model give whose own output has no row for each sample."""


def measure_before(model: nn.Module, edits: Sequence[Edit], example: object) -> Before | Probe:
    """The first input that the model takes, and what comes of it; or why there is none."""
    failed: LayerFailed | None = None
    tried: list[str] = []
    complaint = last = ""
    hopeless = False
    for probe in probes(model, example):
        if probe.example is None:
            return probe
        if hopeless and not probe.given and probe.example.is_floating_point():
            continue
        tried.append(probe.text)
        try:
            before = _run_before(model, edits, probe)
            # where all is NaN, any two models agree
            if not before.output or any(bool(t.isfinite().any()) for t in before.output):
                return before
            complaint = " The last one gave no finite number."
            path = not_finite(model)  # which no other size can cure
            if path is not None or probe.given:
                why = "" if path is None else f": {path} is not finite"
                return Probe(None, f"{NO_NUMBERS} for {probe.text}{why}")
        except LayerFailed as error:  # perhaps the input is too small: another may do
            failed = error
        except Exception as error:
            # what does not depend on the size of the input, larger ones cannot cure
            hopeless = last == str(error) or not isinstance(error, ABOUT_SIZES)
            last = str(error)
            complaint = f" The last one gave {error_words(error)}."
            if probe.given:
                raise OptionError(
                    f"The model fails on {probe.text}: {error_words(error)}. {UNTOUCHED} "
                    "Try another example, or example=False to do without measuring."
                ) from error
    if failed is not None:
        path = str(failed).partition(":")[0]
        raise OptionError(
            f"{failed} That is what comes of {tried[-1]}. {UNTOUCHED} Try other options, another "
            f'example, or leave the layer out: where="!{path}".'
        ) from failed
    tries = f" The model took none of: {'; '.join(tried)}.{complaint}" if tried else ""
    return Probe(None, f"{NO_INPUT}{tries}")


def certify(
    model: nn.Module, edits: Sequence[Edit], before: Before | Probe, title: str, notes: list[str]
) -> Certificate:
    """The certificate of a model that has been converted."""
    replaced = replacements(edits)
    if isinstance(before, Probe):
        return Certificate(title, len(replaced), before.text, False, notes=tuple(notes))
    try:
        output, stale = _run_after(model, replaced, before.probe)
    except Exception as error:
        raise OptionError(
            f"The converted model fails on {before.probe.text}: {error_words(error)}. {UNTOUCHED}"
        ) from error
    if stale:
        raise OptionError(
            f"{', '.join(stale)}: the model also calls it from a place that is no submodule, "
            f"such as a list or a closure, where it cannot be replaced. {UNTOUCHED} Try "
            "nn.ModuleList in the model."
        )
    dtype = before.output[0].dtype if before.output else torch.float32
    gap = difference(before.output, output) if before.output or output else None
    reshaped = [t.shape for t in before.output] != [t.shape for t in output]
    inside = _compare_parts(model, before) if reshaped else {}
    certificate = Certificate(
        title,
        len(replaced),
        before.probe.text,
        True,
        dtype=str(dtype).removeprefix("torch."),
        difference=None if reshaped else gap,
        inside=inside,
        reshaped=reshaped,
        layers=before.layers,
        unreached=tuple(before.unreached),
        tolerance=rounding(dtype),
        notes=tuple(notes),
        finite=_finite(output) or not _finite(before.output),
    )
    if inside and max(inside.values()) <= certificate.tolerance:
        return replace(certificate, rounding_is_enough=True)
    if replaced and certificate.layers_exact and not certificate.exact and gap is not None:
        change = sensitivity(model, before.probe)
        if change >= SIMILAR * gap:
            much = "its shapes" if reshaped else f"by {change:.1e}"
            note = (
                f"With an input that differs in its last digits the output changes {much}"
                " as well: rounding is enough."
            )
            return replace(certificate, notes=(*notes, note), rounding_is_enough=True)
    return certificate


def _finite(tensors: Sequence[Tensor]) -> bool:
    return all(bool(t.isfinite().all()) for t in tensors)


def sensitivity(model: nn.Module, probe: Probe) -> float:
    """How much the output of a model changes with the last digits of its input."""

    def nudged(tensor: Tensor) -> Tensor:
        return tensor * (1 + NUDGE) if tensor.is_floating_point() else tensor

    with undisturbed(model), full_precision(model):
        first = [t.clone() for t in leaves(probe.run(model))]
        other = Probe(tree_map_only(Tensor, nudged, probe.example), probe.text)
        return difference(first, leaves(other.run(model)))


def _run_before(model: nn.Module, edits: Sequence[Edit], probe: Probe) -> Before:
    """Run the old model; whatever comes to an old layer is shown to the new one too.

    The new layers compute with the tensors that they will have when all edits are done. Layers
    that the model does not call for this input are compared on random numbers.
    """
    before = Before(probe)
    replaced = replacements(edits)
    hooks = [
        _comparing(edit, final, before)
        for edit, final in zip(replaced, final_tensors(edits), strict=True)
    ]
    with ExitStack() as stack:
        for edit, hook in zip(replaced, hooks, strict=True):
            assert edit.old is not None
            handle = edit.old.register_forward_pre_hook(hook, with_kwargs=True)
            stack.callback(handle.remove)
        stack.enter_context(undisturbed(model))
        stack.enter_context(undisturbed(nn.ModuleList(edit.new for edit in replaced)))
        stack.enter_context(full_precision(model))
        before.output = [t.detach().clone() for t in leaves(probe.run(model))]
        for edit, hook in zip(replaced, hooks, strict=True):
            if edit.paths[0] not in before.layers and edit.old is not None:
                before.unreached.append(edit.paths[0])
                _compare_on_numbers(edit.old, hook)
    images = samples_in(probe.example)
    if not before.output or any(t.dim() == 0 or len(t) != images for t in before.output):
        before.inside = _outputs_of_parts(model, probe)
    return before


def _outputs_of_parts(model: nn.Module, probe: Probe) -> dict[str, list[Tensor]]:
    """What each child of a model gives, in the order of the calls."""
    outputs: dict[str, list[Tensor]] = {}

    def keep(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            outputs.pop(name, None)  # the last call counts
            outputs[name] = [t.detach().clone() for t in leaves(output)]

        return hook

    with ExitStack() as stack:
        for name, child in model.named_children():
            stack.callback(child.register_forward_hook(keep(name)).remove)
        stack.enter_context(undisturbed(model))
        stack.enter_context(full_precision(model))
        probe.run(model)
    return outputs


def _compare_parts(model: nn.Module, before: Before) -> dict[str, float]:
    """How much the last part differs whose output has the shapes that it had; empty if none."""
    after = _outputs_of_parts(model, before.probe) if before.inside else {}
    for name in reversed(before.inside):
        old, new = before.inside[name], after.get(name, [])
        if old and [t.shape for t in old] == [t.shape for t in new]:
            return {name: difference(old, new)}
    return {}


def _run_after(
    model: nn.Module, replaced: Sequence[ReplaceModule], probe: Probe
) -> tuple[list[Tensor], list[str]]:
    """The output of the new model, and the paths of old layers that it still calls."""
    stale: dict[str, None] = {}

    def watching(edit: ReplaceModule) -> Hook:
        def watch(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if module is edit.old:
                stale[edit.paths[0]] = None

        return watch

    with ExitStack() as stack:
        for edit in replaced:  # old and new module have one dictionary of hooks
            hook = edit.new.register_forward_pre_hook(watching(edit), with_kwargs=True)
            stack.callback(hook.remove)
        stack.enter_context(undisturbed(model))
        stack.enter_context(full_precision(model))
        return leaves(probe.run(model)), list(stale)


def _comparing(edit: ReplaceModule, final: dict[str, Tensor], before: Before) -> Hook:
    """A hook that shows the input of the old layer to the new one, and notes the difference."""
    path, layers = edit.paths[0], before.layers
    images = samples_in(before.probe.example)

    def compare(old: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        was = old.forward(*_copied(args), **_copied(kwargs))  # without the hooks
        try:
            now = functional_call(edit.new, final, _copied(args), _copied(kwargs))
        except Exception as error:
            raise LayerFailed(f"{path}: {error}") from error
        layers[path] = max(layers.get(path, 0.0), difference(leaves(was), leaves(now)))
        if args and isinstance(args[0], Tensor) and len(args[0]) != images:
            before.samples[path] = len(args[0])

    return compare


def _compare_on_numbers(old: nn.Module, compare: Hook) -> None:
    norm = old.norm if isinstance(old, NormAct) else old
    tensors = (*old.parameters(), *old.buffers(), torch.empty(0, device="cpu"))
    like = next(t for t in tensors if t.is_floating_point())
    channels = channels_of(norm)
    if channels is None:
        return
    for rank in (2, 1, 3):
        try:
            compare(old, (noise((2, channels, *(POSITIONS,) * rank), like),), {})
            return
        except Exception:  # another rank may fit; if none does, the layer stays unmeasured
            continue


def _copied(arguments: Any) -> Any:
    """Copies of the tensors: a layer may work in place."""
    return tree_map_only(Tensor, torch.clone, arguments)
