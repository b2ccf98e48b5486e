"""From a norm of a model to the module that takes its place: any source, any target."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from normkit.conversion.accounting import account, describe
from normkit.conversion.belongings import attributes, carry_freezing
from normkit.conversion.marks import own_class, state_of
from normkit.conversion.reading import Reading, plain
from normkit.conversion.sharing import share_parameters
from normkit.conversion.sources import norm_of, read
from normkit.conversion.step import Step
from normkit.conversion.targets import Target, find_target
from normkit.conversion.trial import is_exact, materialised, misread, numbers
from normkit.errors import NormkitError
from normkit.inspection import Site
from normkit.layers.batch import BatchNormalizer
from normkit.layers.norm_act import NormAct

TRUSTED = ("normkit", "torch")  # whose classes compute what their names say


def build(
    site: Site,
    to: str | type | Target,
    options: dict[str, Any] | None = None,
    *,
    rank: int = 2,
    like: Tensor | None = None,
) -> tuple[nn.Module | None, Step]:
    """The module that takes the place of a norm, None if nothing is to be done; and the step.

    ``rank`` is the number of spatial axes of its input; ``like`` tells device and type where the
    norm has no tensors.
    """
    options = options or {}
    target = to if isinstance(to, Target) else find_target(to)
    target.check(options)
    norm = norm_of(site.module)
    left = Step(site.path, describe(site.module), action="keep", paths=site.paths)
    if _is_already(norm, target, options):
        return None, _because(left, "keep", f"it is {target.name} already")
    reading = read(site)
    if isinstance(reading, str):
        return None, _because(left, "skip", reading)
    told = (reading.weight, reading.mean, like, torch.empty(0, device="cpu"))
    anchor = next(tensor for tensor in told if tensor is not None)
    if reason := _unchecked(site, reading, rank, anchor):
        return None, _because(left, "skip", reason)
    made = _make(site, target, reading, options, rank, anchor)
    if isinstance(made, str):
        return None, _because(left, "skip", made)
    if type(made) is type(norm) and repr(made) == repr(norm):
        return None, _because(left, "keep", f"it is {target.name} with these options already")
    shared = share_parameters(made, norm, target, reading)
    assert site.channels is not None
    for name, value in attributes(norm, site.channels).items():
        if not hasattr(made, name):
            setattr(made, name, value)
    carry_freezing(norm, made)
    new = _with_activation(made, site)
    claimed = target.from_bn and reading.mean is not None and not options and not reading.lost
    x = numbers(site.channels, rank, anchor, norm)
    exact = claimed if anchor.is_meta else is_exact(site.module, new, x)
    return new, account(site, reading, made, new, shared, exact)


def _because(step: Step, action: Any, reason: str) -> Step:
    return Step(step.path, step.was, action=action, reason=reason, paths=step.paths)


def _is_already(norm: nn.Module, target: Target, options: dict[str, Any]) -> bool:
    if own_class(norm) not in target.classes:
        return False
    asked = {"num_groups" if isinstance(norm, nn.GroupNorm) and k == "groups" else k: v
             for k, v in options.items()}  # fmt: skip
    return all(hasattr(norm, name) and getattr(norm, name) == v for name, v in asked.items())


def _unchecked(site: Site, reading: Reading, rank: int, anchor: Tensor) -> str:
    """Why a norm cannot be believed to be what it says; empty if it can."""
    if site.library in TRUSTED and not site.own_forward:
        return ""
    if anchor.is_meta:
        if not site.own_forward:
            return ""
        site, anchor = materialised(site), torch.empty(0, device="cpu", dtype=torch.float32)
        reading = plain(site.module)
    assert site.channels is not None
    return misread(site, reading, numbers(site.channels, rank, anchor))


def _make(
    site: Site,
    target: Target,
    reading: Reading,
    options: dict[str, Any],
    rank: int,
    anchor: Tensor,
) -> nn.Module | str:
    """The new norm, or why there is none. An option that does not fit is the caller's error."""
    norm = norm_of(site.module)
    assert site.channels is not None
    bn = reading.as_batch_norm(norm, site.channels, anchor)
    usual: dict[str, Any] = {}
    of_batches = site.kind in ("bn", "sync_bn") or isinstance(norm, BatchNormalizer)
    if reading.mean is None and target.name == "frozen_bn":
        return "it keeps no running statistics that could be frozen"
    if not of_batches and reading.mean is None and target.name == "sync_bn":
        return "it has nothing to synchronise: only batch norms have that form"
    if of_batches and reading.mean is None and "track_running_stats" in target.options:
        usual["track_running_stats"] = False  # or eval mode would use statistics of nothing
    try:
        return target.make(bn, rank, {**usual, **options})
    except NormkitError as error:
        try:
            target.make(bn, rank, usual)
        except NormkitError as without:
            return str(without)
        raise type(error)(f"{site.path}: {error}") from error


def _with_activation(made: nn.Module, site: Site) -> nn.Module:
    """The activation and drop layer of a fused norm live on: the same modules."""
    if site.act is None and site.drop is None:
        return made
    new = NormAct(made, site.act, drop=site.drop)
    state = state_of(site.module)  # a frozen norm does not show the mode of the model
    # not train(): activation and drop layer keep their own mode
    new.training = site.module.training if state is None else state.mode
    return new
