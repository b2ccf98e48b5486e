"""From what a recipe wants of each norm to a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from normkit.conversion.accounting import describe
from normkit.conversion.edit import Edit
from normkit.conversion.elsewhere import kept_elsewhere
from normkit.conversion.places import neighbour, rank_of
from normkit.conversion.plan import Optimizers, Plan
from normkit.conversion.replacing import ReplaceModule
from normkit.conversion.rules import build
from normkit.conversion.sharing import tie, untied
from normkit.conversion.step import Step
from normkit.conversion.wrappers import refuse_unchangeable
from normkit.errors import NothingToDo
from normkit.inspection import Site, Survey, select, survey
from normkit.layers.norm_act import NormAct

BATCH = ("bn", "sync_bn", "ghost_bn")  # what the papers start from

Wish = tuple[str, dict[str, Any]]
"""What a norm is to become, and with which options."""


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
    found = survey(model, None if example is False else example)
    if not any(site.kind in (*BATCH, *targets) for site in found):
        kinds = ", ".join(found.kinds) or "none at all"
        raise NothingToDo(
            f"{recipe} starts from batch norms, and {found.title} has none. Its norms: {kinds}."
        )
    return found


def several(blocks: Sequence[str], found: Survey) -> dict[str, int]:
    """How many norms each block has, shortcuts not counted, of blocks with more than one."""
    counts = {
        block: sum(site.block == block and not site.shortcut for site in found) for block in blocks
    }
    return {block: count for block, count in counts.items() if count > 1}


def assemble(
    model: nn.Module,
    found: Survey,
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
    edits: list[ReplaceModule] = []
    steps: list[Step] = []
    chosen = {id(site) for site in select(found, where)}
    for site in found:
        wanted = wish(site) if id(site) in chosen else "left out by where"
        if not isinstance(wanted, str) and site.kind not in (*BATCH, wanted[0]):
            wanted = f"it is {site.kind}, no batch norm"
        if isinstance(wanted, str):
            was = describe(site.module)
            steps.append(Step(site.path, was, action="keep", reason=wanted, paths=site.paths))
            continue
        to, options = wanted
        place = {"rank": rank_of(site, model), "like": neighbour(site, model)}
        new, step = build(site, to, options, **place)  # type: ignore[arg-type]
        steps.append(step)
        if new is not None:
            edits.append(ReplaceModule(site.paths, new, old=site.module))
    tie(edits)
    broken = untied(model, edits)
    steps = [replace(s, lost=(*s.lost, *broken.get(s.path, ()))) for s in steps]
    more = besides({edit.paths[0]: edit.new for edit in edits})
    title = f"{found.title}, recipe {title}"
    return Plan(
        model,
        [*edits, *more],
        steps,
        example=example,
        optimizer=optimizer,
        title=title,
        notes=[*notes, *kept_elsewhere(model, edits)],
    )


def norm_path(path: str, module: nn.Module) -> str:
    """Where the norm itself is, whose parameters are meant."""
    return f"{path}.norm" if isinstance(module, NormAct) else path
