"""Parameters that live on in the new module, and ties between modules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from normkit.conversion.reading import Reading
from normkit.conversion.replacing import ReplaceModule
from normkit.conversion.sources import norm_of
from normkit.conversion.targets import Target


def share_parameters(
    made: nn.Module, norm: nn.Module, target: Target, reading: Reading
) -> set[str]:
    """Let the new norm hold the very parameters of the old one where they mean the same.

    So optimizers, averages, hooks and ties that know a parameter go on to know it, even those
    that nobody has told of the conversion. Returns their names.
    """
    if getattr(made, "form", "standard") != "standard":
        return set()
    shared = set()
    for name in target.roles:
        old, new = norm._parameters.get(name), made._parameters.get(name)
        if name in reading.plain and old is not None and new is not None and _equal(old, new):
            made._parameters[name] = old
            shared.add(name)
    for name, parameter in made._parameters.items():
        before = norm._parameters.get(name)
        if parameter is not None and before is not None and name not in shared:
            parameter.requires_grad_(before.requires_grad)
    return shared


def _equal(old: Any, new: Any) -> bool:
    alike = old.shape == new.shape and old.dtype == new.dtype and old.device == new.device
    return alike and (old.is_meta or torch.equal(old, new))


def tie(edits: Sequence[ReplaceModule]) -> None:
    """Where two old norms hold one parameter, let the new ones do so too."""
    first: dict[tuple[int, str], nn.Parameter] = {}
    for edit in edits:
        for name, old, new in _fresh(edit):
            known = first.setdefault((id(old), name), new)
            if known is not new and _equal(known, new):
                norm_of(edit.new)._parameters[name] = known


def untied(model: nn.Module, edits: Sequence[ReplaceModule]) -> dict[str, list[str]]:
    """By path, the parameters that a module which stays has in common with an old norm."""
    going = {id(norm_of(edit.old)) for edit in edits if edit.old is not None}
    stay = {id(p) for m in model.modules() if id(m) not in going for p in m._parameters.values()}
    found: dict[str, list[str]] = {}
    for edit in edits:
        for name, old, _ in _fresh(edit):
            if id(old) in stay:
                found.setdefault(edit.paths[0], []).append(f"tie of {name} with another module")
    return found


def _fresh(edit: ReplaceModule) -> Iterator[tuple[str, nn.Parameter, nn.Parameter]]:
    """The parameters of the new norm that are not those of the old one, with both."""
    assert edit.old is not None
    old, new = norm_of(edit.old), norm_of(edit.new)
    for name, parameter in list(new._parameters.items()):
        source = old._parameters.get(name)
        if parameter is not None and source is not None and parameter is not source:
            yield name, source, parameter
