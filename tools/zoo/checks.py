"""What a conversion is held to: nothing of a model may get lost in silence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from normkit.conversion.plan import Plan, Step
from normkit.conversion.sources import norm_of
from normkit.inspection import Site, Survey, survey
from normkit.layers.base import Normalizer
from tools.zoo.models import BATCH_NORM, count_batch_norms

SMALL = 1 << 16  # numbers; larger tensors are not copied
STATISTICS = ("running_mean", "running_var", "running_std", "running_second_moment")
COUNTERS = ("num_batches_tracked", "nonfinite_batches")  # they go with the statistics


class ModelSnapshot:
    """Every module and tensor of a model by name: the objects themselves, modes and values."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules = modules_of(model)
        self.tensors = tensors_of(model)
        self._modes = {path: module.training for path, module in self.modules.items()}
        self._trained = {name: t.requires_grad for name, t in self.tensors.items()}
        # torch counts the changes of a tensor: a large one must not have been touched at all
        self._counts = {name: t._version for name, t in self.tensors.items()}
        self._values = {
            name: t.detach().clone() for name, t in self.tensors.items() if t.numel() <= SMALL
        }

    def differences(self, may_change: frozenset[str] = frozenset()) -> Iterator[str]:
        """What is not as it was; tensors that a run may change are named."""
        modules, tensors = modules_of(self.model), tensors_of(self.model)
        for what, now, then in (
            ("modules", list(modules), list(self.modules)),
            ("tensors", list(tensors), list(self.tensors)),
        ):
            if now != then:
                yield f"{what} came, went or changed places: {some(set(now) ^ set(then))}"
        for path, module in self.modules.items():
            if modules.get(path) is not module:
                yield f"{path} is another module"
            elif module.training != self._modes[path]:
                yield f"{path} is in another mode"
        for name, tensor in self.tensors.items():
            if tensors.get(name) is not tensor:
                yield f"{name} is another tensor"
            elif tensor.requires_grad != self._trained[name]:
                yield f"{name}: requires_grad changed"
            elif not self._kept(name, tensor) and name not in may_change:
                yield f"{name} has other values"

    def _kept(self, name: str, tensor: Tensor) -> bool:
        if tensor.is_meta or tensor._version == self._counts[name]:
            return True
        return name in self._values and torch.equal(tensor, self._values[name])


def modules_of(model: nn.Module) -> dict[str, nn.Module]:
    """Every module under every one of its paths."""
    return dict(model.named_modules(remove_duplicate=False))


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer under every one of its names."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {**parameters, **dict(model.named_buffers(remove_duplicate=False))}


def some(names: set[str]) -> str:
    """A few of the names."""
    more = ", …" if len(names) > 3 else ""
    return ", ".join(sorted(names)[:3]) + more


def overlooked(model: nn.Module, surveyed: Survey) -> Iterator[str]:
    """Batch norms that a survey has not seen, going by torch's class and not by our own eyes."""
    seen = {id(part) for site in surveyed for part in site.module.modules()}
    for path, module in model.named_modules():
        if isinstance(module, BATCH_NORM) and id(module) not in seen:
            yield f"{path} ({type(module).__name__}) is missing from the survey"


def unplanned(plan: Plan, surveyed: Survey) -> Iterator[str]:
    """Norms of which a plan says nothing, and norms it leaves out without a reason."""
    steps = [step.path for step in plan.steps]
    if steps != [site.path for site in surveyed]:
        yield f"survey and plan differ: {some({site.path for site in surveyed} ^ set(steps))}"
    for step in plan.steps:
        if step.action == "skip" and not step.reason:
            yield f"{step.path} is skipped without a reason"


def misplaced(before: ModelSnapshot, surveyed: Survey, plan: Plan, target: str) -> Iterator[str]:
    """What an applied plan has changed beside what it says, or left though it says otherwise."""
    after = {site.path: site for site in survey(before.model)}
    if list(after) != [site.path for site in surveyed]:
        yield f"norms came or went: {some(set(after) ^ {site.path for site in surveyed})}"
        return
    converted = {step.path for step in plan.steps if step.action == "convert"}
    for site in surveyed:
        if site.path in converted:
            yield from _wrong(site, after[site.path], target)
        elif after[site.path].module is not site.module:
            yield f"{site.path} is another module, though it was not to be converted"
    yield from _changed_outside(
        before, {p for s in surveyed if s.path in converted for p in s.paths}
    )
    left = count_batch_norms(before.model)
    planned = sum(count_batch_norms(site.module) for site in surveyed if site.path not in converted)
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


def _changed_outside(before: ModelSnapshot, converted: set[str]) -> Iterator[str]:
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


def _name(module: nn.Module | None) -> str:
    return "none" if module is None else type(module).__name__


def unaccounted(model: nn.Module, surveyed: Survey, steps: tuple[Step, ...]) -> Iterator[str]:
    """Tensors that came or went without a word, or say that they were carried and were not.

    ``surveyed`` is the survey of the model before; the model is the converted one.
    """
    by_path = {step.path: step for step in steps if step.action == "convert"}
    for site in surveyed:
        if site.path not in by_path:
            continue
        step = by_path[site.path]
        norm = norm_of(model.get_submodule(site.path))
        old, new = tensors_of(norm_of(site.module)), tensors_of(norm)
        hidden = norm._non_persistent_buffers_set
        for name in old:
            if not _is_in(name, {*step.carried, *step.lost}):
                yield f"{site.path}: {name} is neither carried nor lost"
        for name in new:
            if name not in hidden and not _is_in(name, {*step.carried, *step.initialised}):
                yield f"{site.path}: {name} is neither carried nor new"
        for name, parameter in norm.named_parameters():
            compared = name in step.carried and name in old and _means_the_same(norm, name)
            if compared and not parameter.is_meta and not torch.equal(old[name], parameter):
                yield f"{site.path}: {name} is said to be carried, and has other values"


def _means_the_same(norm: nn.Module, parameter: str) -> bool:
    """Whether it is what the weight or bias of a batch norm is, as it was there."""
    return not isinstance(norm, Normalizer) or norm.parameter_role(parameter).of_batch_norm


def _is_in(name: str, listed: set[str]) -> bool:
    if name in STATISTICS:
        name = "running statistics"
    return name in listed or name in COUNTERS or any(text.startswith(f"{name} ") for text in listed)
