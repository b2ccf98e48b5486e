"""Several copies of a model: ranks, and a moving average."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from normkit.core.messages import counted
from normkit.core.moments import Moments
from normkit.diagnosis.findings.bounds import (
    FITS,
    OFF,
    SURE,
    WRONG,
    averaged_batches,
    sampling_error,
)
from normkit.diagnosis.findings.evidence import Evidence, State
from normkit.diagnosis.findings.finding import Finding, Kind, named, places
from normkit.diagnosis.findings.known import Known
from normkit.diagnosis.findings.layer import Layer
from normkit.inspection.keeping import reader_of

EMA = Kind(
    "ema-without-buffers",
    "Averaged weights with statistics that are not theirs",
    "A moving average of parameters() leaves buffers where they were. The averaged weights make "
    "other activations than those the statistics were taken from.",
    "timm#224, ignite#2590, mean-teacher#9, ema-pytorch#29",
    spoils=True,
)
RANKS = Kind(
    "rank-disagreement",
    "Processes have different running statistics",
    "Each process tracks the statistics of its own data, and only those of rank 0 are saved. Where "
    "the data differ between processes, the saved ones are not those of all data.",
    "vedaseg#21, mmdetection#3621, fvcore#152",
)
DIVERGED = Kind(
    "rank-weights-differ",
    "Processes have different weights",
    "Data-parallel processes must have equal weights. They were not synchronized, and the model "
    "that is saved is one of several.",
    "pytorch#22095, libreyolo#531",
)


def averages(evidence: Evidence, known: Known) -> Iterator[Finding]:
    live = evidence.ema_of
    if live is None:
        return
    off = []
    for layer in evidence.running():
        theirs = statistics_in(live, layer)
        if layer.path in known.spoiled or not layer.learns or theirs is None or layer.kept is None:
            continue
        wrong = layer.at_start or not layer.fits(OFF)
        if wrong and layer.distance(layer.kept, theirs) > FITS:
            off.append(layer)
    if off:
        worst = max(off, key=lambda layer: layer.error)
        yield EMA.found(
            evidence.severity(off),
            [x.path for x in off],
            f"The statistics of {places([x.path for x in off])} are neither those of the live "
            f"model nor of the averaged weights: the output of {named(worst.path)} is off by "
            f"{worst.error:.2f}. It has counted {worst.count} batches, the live model "
            f"{_count(live, worst)}.",
            worst=worst.path,
            remedy=evidence.calibrating,
            output_error=worst.error,
            batches=worst.count,
            batches_live=_count(live, worst),
            layers=len(off),
        )


def ranks(evidence: Evidence, known: Known) -> Iterator[Finding]:
    if len(evidence.ranks) < 2:
        return
    if names := _different_weights(evidence):
        yield DIVERGED.found(
            "serious",
            [],
            f"The weights of {counted(len(names), 'parameter')} differ between the "
            f"{len(evidence.ranks)} ranks, first in {names[0]}.",
            remedy="model.load_state_dict(ranks[0])"
            "  # in all processes, and train on in DistributedDataParallel",
            parameters=len(names),
        )
    far: dict[Layer, tuple[float, float]] = {}
    for layer in evidence.running():
        each = [statistics_in(state, layer) for state in evidence.ranks]
        there = [x for x in each if x is not None]
        if layer.frozen or len(there) < 2:
            continue
        found, bound = _disagreement(layer, there), _by_chance(layer)
        if found > bound:
            far[layer] = found, bound
    if far:
        worst = max(far, key=lambda layer: far[layer][0])
        found, bound = far[worst]
        yield RANKS.found(
            "serious" if found >= WRONG else "warning",
            [x.path for x in far],
            f"The statistics of {named(worst.path)} differ between {len(evidence.ranks)} ranks: "
            f"used for what all ranks see, those of one put the output off by {found:.2f}.",
            worst=worst.path,
            remedy=f"{evidence.calibrating}  # in one process, for all",
            disagreement=found,
            by_chance=bound,
            ranks=len(evidence.ranks),
            layers=len(far),
        )


def statistics_in(state: State, layer: Layer) -> Moments | None:
    """The running statistics of a layer in a state_dict, as mean and variance (1, K)."""
    mean = state_value(state, f"{layer.prefix}running_mean")
    second = state_value(state, f"{layer.prefix}{layer.second}")
    if mean is None or second is None or layer.kept is None:
        return None
    reader = reader_of(layer.norm)
    assert reader is not None
    device = layer.kept.mean.device
    var = reader.as_variance(mean, second)
    return Moments(mean[None].to(device), var[None].to(device), 1)


def _disagreement(layer: Layer, there: list[Moments]) -> float:
    """The largest output error of one rank's statistics where those of all are right."""
    together = Moments(
        torch.cat([x.mean for x in there]), torch.cat([x.var for x in there]), 1
    ).pooled(samples=None)
    return max(layer.distance(each, together) for each in there)


def _by_chance(layer: Layer) -> float:
    """What random batches may make of it: a running average is worth several batches."""
    if layer.trained is None or len(layer.trained.of_batches) < 2 or not layer.momentum:
        return OFF / 2  # as of ten independent values
    values = layer.values(layer.trained) * averaged_batches(layer.momentum)
    return max(FITS, SURE * sampling_error(values))


def _different_weights(evidence: Evidence) -> list[str]:
    names = [name for name, _ in evidence.model.named_parameters()]
    first, *others = evidence.ranks
    return [name for name in names if any(_differ(first, each, name) for each in others)]


def _differ(one: State, other: State, name: str) -> bool:
    a, b = state_value(one, name), state_value(other, name)
    return isinstance(a, Tensor) and isinstance(b, Tensor) and not torch.equal(a.cpu(), b.cpu())


def _count(state: State, layer: Layer) -> int | None:
    found = state_value(state, f"{layer.prefix}num_batches_tracked")
    return None if found is None else int(found)


KINDS = (EMA, RANKS, DIVERGED)


def state_value(state: State, key: str) -> Tensor | None:
    """A tensor of a state_dict, also of one that a wrapper has put a word before."""
    for name in (key, f"module.{key}", f"_orig_mod.{key}"):
        if isinstance(found := state.get(name), Tensor):
            return found.detach()
    return None
