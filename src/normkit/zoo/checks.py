"""What a conversion is held to: nothing of a model may get lost in silence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from normkit.conversion.plan import Plan
from normkit.inspection import Site, Survey, survey
from normkit.zoo.snapshot import Snapshot, modules_of, some, tensors_of

BATCH_NORM = nn.modules.batchnorm._BatchNorm


def overlooked(model: nn.Module, found: Survey) -> Iterator[str]:
    """Batch norms that a survey has not seen, going by torch's class and not by our own eyes."""
    seen = {id(part) for site in found for part in site.module.modules()}
    for path, module in model.named_modules():
        if isinstance(module, BATCH_NORM) and id(module) not in seen:
            yield f"{path} ({type(module).__name__}) is missing from the survey"


def unplanned(plan: Plan, found: Survey) -> Iterator[str]:
    """Norms of which a plan says nothing, and norms it leaves out without a reason."""
    steps = [step.path for step in plan.steps]
    if steps != [site.path for site in found]:
        yield f"survey and plan differ: {some({site.path for site in found} ^ set(steps))}"
    for step in plan.steps:
        if step.action == "skip" and not step.reason:
            yield f"{step.path} is skipped without a reason"


def misplaced(before: Snapshot, found: Survey, plan: Plan, target: str) -> Iterator[str]:
    """What an applied plan has changed beside what it says, or left though it says otherwise."""
    after = {site.path: site for site in survey(before.model)}
    if list(after) != [site.path for site in found]:
        yield f"norms came or went: {some(set(after) ^ {site.path for site in found})}"
        return
    converted = {step.path for step in plan.steps if step.action == "convert"}
    for site in found:
        if site.path in converted:
            yield from _wrong(site, after[site.path], target)
        elif after[site.path].module is not site.module:
            yield f"{site.path} is another module, though it was not to be converted"
    yield from _elsewhere(before, {p for s in found if s.path in converted for p in s.paths})
    left = batch_norms(before.model)
    planned = sum(batch_norms(site.module) for site in found if site.path not in converted)
    if left != planned:
        yield f"{left} batch norms of torch remain, {planned} of them according to plan"


def _wrong(old: Site, new: Site, target: str) -> Iterator[str]:
    """How a converted norm differs from what it should be."""
    facts: dict[str, tuple[Any, Any]] = {
        "kind": (target, new.kind),
        "paths": (old.paths, new.paths),
        "channels": (old.channels, new.channels),
        "eps": (old.eps, new.eps),
        "affine": (old.affine, new.affine),
        "device, type and training of parameters": (_home(old.module), _home(new.module)),
        "training": (old.module.training, new.module.training),  # the survey is older
    }
    for fact, (expected, came) in facts.items():
        if expected != came:
            yield f"{old.path}: {fact} should be {expected} and is {came}"
    for what, was, now in (("activation", old.act, new.act), ("drop layer", old.drop, new.drop)):
        if was is not now:
            yield f"{old.path}: its {what} {_name(was)} became {_name(now)}"


def _home(module: nn.Module) -> set[tuple[torch.device, torch.dtype, bool]]:
    return {(p.device, p.dtype, p.requires_grad) for p in module.parameters()}


def _elsewhere(before: Snapshot, converted: set[str]) -> Iterator[str]:
    """Changes at places where there is no converted norm."""
    for word, then, now in (
        ("module", before.modules, modules_of(before.model)),
        ("tensor", before.tensors, tensors_of(before.model)),
    ):
        for name in {**then, **now}:
            if now.get(name) is not then.get(name) and not is_inside(name, converted):
                yield f"{name} is another {word}, though it belongs to no converted norm"


def is_inside(name: str, paths: set[str]) -> bool:
    """Whether a module or tensor is at one of the paths or below it."""
    parts = name.split(".")
    return any(".".join(parts[: i + 1]) in paths for i in range(len(parts)))


def batch_norms(module: nn.Module) -> int:
    """How many batch norms of torch a module has, itself included."""
    return sum(isinstance(part, BATCH_NORM) for part in module.modules())


def _name(module: nn.Module | None) -> str:
    return "none" if module is None else type(module).__name__
