"""Every tensor of a norm must be in the books of its step: carried, started or lost."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from normkit.conversion.sources import norm_of
from normkit.conversion.step import Step
from normkit.conversion.targets import find_target
from normkit.inspection import Survey
from normkit.zoo.snapshot import tensors_of

STATISTICS = ("running_mean", "running_var", "running_std", "running_second_moment")
COUNTERS = ("num_batches_tracked", "nonfinite_batches")  # they go with the statistics


def unaccounted(
    model: nn.Module, found: Survey, steps: tuple[Step, ...], target: str
) -> Iterator[str]:
    """Tensors that came or went without a word, or say that they were carried and were not.

    ``found`` is the survey of the model before; the model is the converted one.
    """
    roles = find_target(target).roles
    by_path = {step.path: step for step in steps if step.action == "convert"}
    for site in found:
        if site.path not in by_path:
            continue
        step = by_path[site.path]
        old = tensors_of(norm_of(site.module))
        new = tensors_of(norm_of(model.get_submodule(site.path)))
        hidden = norm_of(model.get_submodule(site.path))._non_persistent_buffers_set
        for name in old:
            if not _is_in(name, {*step.carried, *step.lost}):
                yield f"{site.path}: {name} is neither carried nor lost"
        for name in new:
            if name not in hidden and not _is_in(name, {*step.carried, *step.initialised}):
                yield f"{site.path}: {name} is neither carried nor new"
        for name in roles:
            known = name in step.carried and name in old and not old[name].is_meta
            if known and not torch.equal(old[name], new[name]):
                yield f"{site.path}: {name} is said to be carried, and has other values"


def _is_in(name: str, said: set[str]) -> bool:
    if name in STATISTICS:
        name = "running statistics"
    return name in said or name in COUNTERS or any(text.startswith(f"{name} ") for text in said)
