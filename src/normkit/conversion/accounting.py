"""What a conversion carries, starts anew and loses, in words."""

from __future__ import annotations

from torch import nn

from normkit.conversion.belongings import carried_hooks, frozen_parts, lost_with
from normkit.conversion.reading import Reading
from normkit.conversion.sources import norm_of
from normkit.conversion.step import Step
from normkit.inspection import Site
from normkit.layers.base import Normalizer

STATISTICS = {"running_mean", "running_var", "running_std", "running_second_moment"}
COUNTERS = {"num_batches_tracked", "nonfinite_batches"}


def account(
    site: Site, reading: Reading, made: nn.Module, new: nn.Module, shared: set[str], exact: bool
) -> Step:
    """The step for a norm that becomes ``new``, whose norm is ``made``."""
    norm = norm_of(site.module)
    own = {**made._parameters, **made._buffers}
    tensors = {name for name, tensor in own.items() if tensor is not None}
    hidden = made._non_persistent_buffers_set
    carried: list[str] = []
    started: list[str] = []
    lost = list(reading.lost)
    for name, value in (("weight", reading.weight), ("bias", reading.bias)):
        if name in tensors:
            (started if value is None else carried).append(name)
        elif value is not None:
            lost.append(name)
    if STATISTICS & tensors:
        (started if reading.mean is None else carried).append("running statistics")
    elif reading.mean is not None:
        lost.append("running statistics")
    carried += [n for n in ("eps", "momentum") if _same(norm, made, n)]
    known = {"weight", "bias", *STATISTICS, *COUNTERS, *hidden}
    started += [name for name in own if name in tensors - known]
    for after, word in ((site.act, "activation"), (site.drop, "drop layer")):
        if after is not None:
            carried.append(f"{word} {type(after).__name__}")
    for part in frozen_parts(norm):
        (carried if part in frozen_parts(made) else lost).append(f"freezing of {part}")
    carried += carried_hooks(site.module)
    goes_on = {id(p) for name, p in norm._parameters.items() if name in shared}
    lost += lost_with(site.module, goes_on)
    notes = []
    if "running statistics" in started:
        notes.append("train or calibrate it before eval mode")
    if site.shared:
        notes.append(f"shared by {', '.join(site.paths)}")
    if norm._parameters.get("weight") is not None and "weight" in made._buffers:
        notes.append("weight and bias become buffers, which are not trained")
    return Step(
        path=site.path,
        was=describe(site.module),
        becomes=describe(new),
        action="convert",
        carried=tuple(carried),
        initialised=tuple(started),
        lost=tuple(lost),
        exact=exact,
        reason="; ".join(notes),
        paths=site.paths,
    )


def describe(module: nn.Module) -> str:
    """A norm in a few words: its class, channels and groups, and what is fused to it."""
    norm = norm_of(module)
    if isinstance(norm, Normalizer):
        said = repr(norm)
    else:
        names = ("num_features", "num_channels", "normalized_shape", "num_groups")
        told = {name: getattr(norm, name, None) for name in names}
        groups = told.pop("num_groups")
        size = next((str(v) for v in told.values() if isinstance(v, int | tuple)), "")
        said = f"{type(norm).__name__}({size}{f', groups={groups}' if groups else ''})"
    children = dict(module.named_children())
    inside = [children.get(name) for name in ("drop", "act")]
    fused = [type(m).__name__ for m in inside if m is not None and not isinstance(m, nn.Identity)]
    return " + ".join([said, *fused])


def _same(old: nn.Module, new: nn.Module, name: str) -> bool:
    return hasattr(old, name) and hasattr(new, name) and getattr(old, name) == getattr(new, name)
