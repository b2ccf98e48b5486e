"""From a name to a normalizer."""

from __future__ import annotations

import re
from collections.abc import Iterable
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

_OF_CONVERSIONS = 'It is torch\'s, and made by a conversion: normkit.convert(model, "sync_bn").'
ELSEWHERE = {
    "syncbn": _OF_CONVERSIONS,
    "syncbatchnorm": _OF_CONVERSIONS,
    "spectralnorm": "It normalizes weights, and normkit has none of its kind: try "
    "torch.nn.utils.parametrizations.spectral_norm.",
}
"""Where to find what people ask for by name and the catalog does not have."""


def names(kind: str | None = None) -> list[str]:
    """The names of all normalizers; of one kind, "activation" or "weight", if asked for."""
    if kind not in (None, "activation", "weight"):
        kinds = ("activation", "weight")
        raise OptionError(f"Unknown kind {kind!r}. {nearest(str(kind), kinds)}")
    return sorted(name for name, entry in ENTRIES.items() if kind in (None, entry.card.kind))


def find(name: str) -> type[Any]:
    """The class of a name, or an error that suggests the nearest one.

    What people or torch.nn call a layer will do, if that is only one of the catalog:

    >>> find("GroupNorm") is find("group_norm") is find("gn")
    True
    """
    resolved = name if name in ENTRIES else meant(name, ENTRIES)
    if resolved is None:
        raise UnknownName(f"There is no normalizer {name!r}. {suggestion(name, ENTRIES)}")
    return ENTRIES[resolved]


def suggestion(name: Any, known: Iterable[str]) -> str:
    """A sentence with the name that was meant: as people or torch.nn call a layer, or the nearest.

    >>> suggestion("GroupNorm", names())
    "Did you mean 'gn'?"
    """
    known = list(known)
    word = spoken_form(name)
    # timm's BatchNormAct2d has an activation, which a name alone would drop
    one = meant(name, known) or meant(re.sub(r"act([123]d)?$", "", word), known)
    if one is None and word in ELSEWHERE:
        return ELSEWHERE[word]
    return nearest(str(name).lower(), known) if one is None else f"Did you mean {one!r}?"


def meant(name: Any, known: Iterable[str]) -> str | None:
    """The known name of what people or torch.nn call otherwise; None if it is no such thing."""
    word, known = spoken_form(name), list(known)
    for form in (word, re.sub(r"[123]d$", "", word)):  # LayerNorm2d is no LayerNorm
        for each in known:
            if form in _spoken(each):
                return each
    return None


def spoken_form(name: Any) -> str:
    """A name without what does not count: nn.GroupNorm, group_norm and "group norm" are one."""
    typed = str(name.__name__ if isinstance(name, type) else name).lower()
    return re.sub(r"^(torch\.)?nn\.|[^a-z0-9]", "", typed)


def _spoken(name: str) -> set[str]:
    """What people may call a layer: by its title, with norm for normalization, or an alias."""
    if name not in ENTRIES:
        return {name.replace("_", "")}
    card = ENTRIES[name].card
    title = spoken_form(card.title)
    return {name.replace("_", ""), title, title.replace("normalization", "norm"), *card.aliases}


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
