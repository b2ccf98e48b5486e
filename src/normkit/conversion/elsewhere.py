"""Norms that a model also holds where nothing can be put in their place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from normkit.conversion.replacing import ReplaceModule

REGISTERED = ("_modules", "_parameters", "_buffers")


def kept_elsewhere(model: nn.Module, edits: Sequence[ReplaceModule]) -> list[str]:
    """A note, if an attribute or a list of the model has a norm that will be replaced.

    A forward that calls it from there would go on with the old one. ``apply`` finds that out when
    it runs the model; on the meta device, or without an example, this is all there is.
    """
    going = {id(edit.old): edit.paths[0] for edit in edits}
    found = []
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in REGISTERED:
                at = f"{path}.{name}" if path else name
                found += [f"{going[id(v)]} in {at}" for v in _held(value) if id(v) in going]
    if not found:
        return []
    return [
        f"Also kept outside of the submodules, where it stays the old one: {', '.join(found)}. "
        "Measure with an example to see whether it is called from there."
    ]


def _held(value: Any) -> Iterator[Any]:
    yield value
    if isinstance(value, list | tuple | set):
        yield from value
    elif isinstance(value, Mapping):
        yield from value.values()
