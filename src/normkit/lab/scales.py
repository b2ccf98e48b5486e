"""The scales of an experiment's file: paper, lab, desk; each is laid over the rest of the file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from normkit.errors import nearest
from normkit.lab.problems import Problems


def names(document: Mapping[str, Any]) -> list[str]:
    """The scales that a file has, in its order."""
    found = document.get("scales", {})
    return list(found) if isinstance(found, Mapping) else []


def chosen(document: Mapping[str, Any], asked: str | None, problems: Problems) -> str:
    """The scale to use: the one asked for, else the file's own choice, else none."""
    known = names(document)
    said = document.get("scale", "")
    if said and said not in known:
        hint = nearest(str(said), known) if known else "The file has no [scales.…]."
        problems.add(("scale",), f"is {said!r}. {hint}")
    if asked is not None and asked not in known:
        hint = nearest(asked, known) if known else "The file has no [scales.…]."
        problems.add((), f"there is no scale {asked!r}. {hint}")
    return asked if asked is not None else str(said)


def merged(document: Mapping[str, Any], scale: str) -> dict[str, Any]:
    """The file as it reads at a scale."""
    rest = {key: value for key, value in document.items() if key not in ("scales", "scale")}
    over = document.get("scales", {}).get(scale, {}) if scale else {}
    return laid_over(rest, over) if isinstance(over, Mapping) else rest


def laid_over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Tables are merged key by key; everything else, lists of tables too, is replaced."""
    result = dict(below)
    for key, value in above.items():
        old = result.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        result[key] = laid_over(old, value) if both else value  # type: ignore[arg-type]
    return result
