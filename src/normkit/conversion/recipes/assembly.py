"""From what a recipe wants of each norm to a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from normkit.conversion.carry import Wish, replace_norms
from normkit.conversion.convert import also_held
from normkit.conversion.edits import Edit, refuse_unchangeable
from normkit.conversion.plan import Optimizers, Plan
from normkit.errors import NothingToDo
from normkit.inspection import Site, Survey, select, survey
from normkit.layers.norm_act import NormAct

BATCH = ("bn", "sync_bn", "ghost_bn")  # what the papers start from


@dataclass(frozen=True)
class Recipe:
    """A recipe as an experiment's file names it."""

    plan: Callable[..., Plan]
    layer: str | None = None
    """Whose options it passes on, unless an option ``norm`` says it."""
    untrained: Callable[[Mapping[str, Any], int], dict[str, Any]] = lambda options, samples: {}
    """What a network that is trained from scratch needs beside the options that were given, with
    so many samples a worker."""


def look(model: nn.Module, example: Any, recipe: str, *targets: str) -> Survey:
    """The norms of a model, if there are batch norms among them, or the recipe's own layers."""
    refuse_unchangeable(model)
    norms = survey(model, None if example is False else example)
    if not any(site.kind in (*BATCH, *targets) for site in norms):
        kinds = ", ".join(norms.kinds) or "none at all"
        raise NothingToDo(
            f"{recipe} starts from batch norms, and {norms.title} has none. Its norms: {kinds}."
        )
    return norms


def several(norms: Survey) -> dict[str, int]:
    """How many norms each block has, shortcuts not counted, of blocks with more than one."""
    counts = {
        block: sum(site.block == block and not site.shortcut for site in norms)
        for block in norms.blocks
    }
    return {block: count for block, count in counts.items() if count > 1}


def assemble(
    model: nn.Module,
    norms: Survey,
    wish: Callable[[Site], Wish | str],
    *,
    title: str,
    where: Any = None,
    example: Any = None,
    optimizer: Optimizers = None,
    besides: Callable[[dict[str, nn.Module]], Iterable[Edit]] = lambda new: (),
    notes: Iterable[str] = (),
) -> Plan:
    """A plan that gives each norm what the recipe wishes; a text says why it stays as it is.

    ``besides`` gets the new modules by path, and tells what else is to be changed.
    """
    chosen = {id(site) for site in select(norms, where)}

    def wanted(site: Site) -> Wish | str:
        wishes = wish(site) if id(site) in chosen else "left out by where"
        if not isinstance(wishes, str) and site.kind not in (*BATCH, wishes[0]):
            return f"it is {site.kind}, no batch norm"
        return wishes

    edits, steps = replace_norms(model, norms, wanted)
    more = besides({edit.paths[0]: edit.new for edit in edits})
    return Plan(
        model,
        [*edits, *more],
        steps,
        example=example,
        optimizer=optimizer,
        title=f"{norms.title}, recipe {title}",
        notes=[*notes, *also_held(model, edits)],
    )


def norm_path(path: str, module: nn.Module) -> str:
    """Where the norm itself is, whose parameters are meant."""
    return f"{path}.norm" if isinstance(module, NormAct) else path
