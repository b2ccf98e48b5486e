"""Doing the edits of a plan and measuring what they do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor, nn

from normkit.conversion.certificate import Certificate, rounding
from normkit.conversion.edit import Edit, do_all, undo_all
from normkit.conversion.measuring import (
    Before,
    LayerFailed,
    measure_after,
    measure_before,
    measure_sensitivity,
)
from normkit.conversion.probing import Probe, probes
from normkit.conversion.replacing import ReplaceModule
from normkit.conversion.values import same
from normkit.errors import OptionError

Tensors = dict[str, Tensor]
SIMILAR = 0.1  # a share that makes two differences alike
UNTOUCHED = "Nothing was changed."


def rehearse(model: nn.Module, edits: tuple[Edit, ...]) -> list[Tensors]:
    """Do all edits and take them back; what the new modules contain in between."""
    do_all(model, edits)
    try:
        return contents(edits)
    finally:
        undo_all(model, edits)


def contents(edits: Sequence[Edit]) -> list[Tensors]:
    """Copies of the tensors of all new modules."""
    return [
        {
            name: tensor.detach().clone()
            for name, tensor in chain(edit.new.named_parameters(), edit.new.named_buffers())
        }
        for edit in replacements(edits)
    ]


def replacements(edits: Sequence[Edit]) -> list[ReplaceModule]:
    return [edit for edit in edits if isinstance(edit, ReplaceModule)]


def unchanged(then: Sequence[Tensors], now: Sequence[Tensors]) -> bool:
    """Whether contents are the same as before."""
    return all(
        same(value, b[name].to(value))
        for a, b in zip(then, now, strict=True)
        for name, value in a.items()
    )


def look_before(model: nn.Module, edits: tuple[Edit, ...], example: object) -> Before | Probe:
    """The first input that the model takes, and what comes of it; or why there is none."""
    if not edits:
        return Probe(None, "nothing was changed")
    final = rehearse(model, edits)
    failed: LayerFailed | None = None
    tried: list[str] = []
    complaint = ""
    for probe in probes(model, example):
        if probe.example is None:
            return probe
        tried.append(probe.text)
        try:
            found = measure_before(model, replacements(edits), final, probe)
            if _has_numbers(found.output):
                return found
            complaint = " The last one gave no finite number."
            if probe.given:
                return Probe(None, f"the model gives no finite number for {probe.text}")
        except LayerFailed as error:  # perhaps the input is too small: another may do
            failed = error
        except Exception as error:
            complaint = f" The last one gave {_said(error)}"
            if probe.given:
                raise OptionError(
                    f"The model fails on {probe.text}: {_said(error)} {UNTOUCHED} "
                    "Try another example, or example=False to convert without measuring."
                ) from error
    if failed is not None:
        path = str(failed).partition(":")[0]
        raise OptionError(
            f"{failed} That is what comes of {tried[-1]}. {UNTOUCHED} Try other options, another "
            f'example, or leave the layer out: where="!{path}".'
        ) from failed
    tries = f" The model took none of: {'; '.join(tried)}.{complaint}" if tried else ""
    return Probe(None, f"no input was given.{tries}")


def look_after(
    model: nn.Module, edits: tuple[Edit, ...], before: Before | Probe, title: str, notes: list[str]
) -> Certificate:
    """The certificate of a model that has been converted."""
    replaced = replacements(edits)
    if isinstance(before, Probe):
        return Certificate(title, len(replaced), before.text, False, notes=tuple(notes))
    text = before.probe.text
    try:
        after = measure_after(model, replaced, before)
    except Exception as error:
        raise OptionError(
            f"The converted model fails on {text}: {_said(error)} {UNTOUCHED}"
        ) from error
    if after.stale:
        raise OptionError(
            f"{', '.join(after.stale)}: the model also calls it from a place that is no submodule, "
            f"such as a list or a closure, where it cannot be replaced. {UNTOUCHED} Try "
            "nn.ModuleList in the model."
        )
    dtype = before.output[0].dtype if before.output else torch.float32
    found = Certificate(
        title,
        len(replaced),
        text,
        True,
        dtype=str(dtype).removeprefix("torch."),
        difference=after.difference,
        layers=before.layers,
        unreached=tuple(before.unreached),
        tolerance=rounding(dtype),
        notes=tuple(notes),
    )
    if replaced and found.layers_exact and not found.exact and after.difference is not None:
        sensitivity = measure_sensitivity(model, before.probe)
        said = (
            f"With an input that differs in its last digits the output changes by {sensitivity:.1e}"
            " as well: rounding is enough."
        )
        if sensitivity >= SIMILAR * after.difference:
            return replace(found, notes=(*notes, said))
    return found


def _has_numbers(output: list[Tensor]) -> bool:
    """Whether there is anything to compare: where all is NaN, any two models agree."""
    return not output or any(bool(t.isfinite().any()) for t in output)


def _said(error: Exception) -> str:
    """The kind of an error and the first line of its text, as a sentence."""
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first.rstrip('.')}."
