"""From a name to a normalizer."""

from __future__ import annotations

from typing import Any

from torch import nn

from normkit import layers
from normkit.core.card import Card
from normkit.errors import OptionError, UnknownName, nearest

ENTRIES: dict[str, type[Any]] = {
    card.name: layer
    for layer in vars(layers).values()
    if isinstance(card := getattr(layer, "card", None), Card)
}
"""Every normalizer by its name in the papers, in the order of layers/__init__.py."""


def names(kind: str | None = None) -> list[str]:
    """The names of all normalizers; of one kind, "activation" or "weight", if asked for."""
    if kind not in (None, "activation", "weight"):
        kinds = ("activation", "weight")
        raise OptionError(f"Unknown kind {kind!r}. {nearest(str(kind), kinds)}")
    return sorted(name for name, entry in ENTRIES.items() if kind in (None, entry.card.kind))


def find(name: str) -> type[Any]:
    """The class of a name, or an error that suggests the nearest one."""
    if name not in ENTRIES:
        raise UnknownName(f"There is no normalizer {name!r}. {nearest(str(name), ENTRIES)}")
    return ENTRIES[name]


def make(name: str, channels: int, **options: Any) -> nn.Module:
    """A normalizer by name, as a configuration file would say it.

    >>> import normkit as nk
    >>> nk.make("gn", 64, groups=16)
    GN(64, groups=16)
    """
    entry = find(name)
    known = entry.options()
    for option in options:
        if option not in known:
            raise OptionError(f"{name} has no option {option!r}. {nearest(option, known)}")
    layer: nn.Module = entry(channels, **options)
    return layer
