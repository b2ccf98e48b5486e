"""Which norms of a model are calibrated, and why the others are not."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from normkit.errors import NothingToDo
from normkit.inspection import Site, select, survey
from normkit.inspection.keepers import Keeper
from normkit.inspection.keeping import keeper_of
from normkit.inspection.quiet import refuse_lazy, refuse_meta


@dataclass(frozen=True)
class Subjects:
    """Norms to be calibrated, and the reason for each that is left alone, by path."""

    keepers: tuple[Keeper, ...]
    left: dict[str, str] = field(default_factory=dict)


def subjects_of(model: nn.Module, where: Any = None, frozen: bool = False) -> Subjects:
    """The norms with running statistics that ``where`` chooses; an error if there are none."""
    found = survey(model)
    if not len(found):
        raise NothingToDo(f"{type(model).__name__} has no normalization layers to calibrate.")
    refuse_lazy(model)
    refuse_meta(model)
    keepers, left = [], {}
    for site in select(found, where):
        keeper = keeper_of(site.path, site.norm, site.kind) if site.tracked else None
        reason = _reason(site, keeper, frozen)
        if reason is None and keeper is not None:
            keepers.append(keeper)
        elif reason:
            left[site.path] = reason
    if not keepers:
        said = "; ".join(f"{path}: {why}" for path, why in list(left.items())[:3])
        raise NothingToDo(
            f"{type(model).__name__} has no running statistics to calibrate"
            f"{f' ({said})' if said else ''}. Norms such as gn or ln keep none."
        )
    return Subjects(tuple(keepers), left)


def _reason(site: Site, keeper: Keeper | None, frozen: bool) -> str | None:
    """Why a norm is left alone; None if it is not, "" if it has nothing to calibrate."""
    if not site.tracked:
        return ""
    if keeper is None:
        return f"statistics of a kind that is not known ({site.class_name})"
    if frozen:
        return None
    if site.kind == "frozen_bn" or getattr(
        getattr(keeper.norm, "_frozen", None), "statistics", False
    ):
        return "frozen; frozen=True includes it"
    return None
