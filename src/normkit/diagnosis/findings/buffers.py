"""What running statistics hold that cannot be right: in one model, or in several copies."""

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
from normkit.diagnosis.findings.finding import EarlierFindings, Finding, Kind, listed, named, places
from normkit.diagnosis.findings.norm import NormEvidence

POISONED = Kind(
    "poisoned-statistics",
    "Running statistics are not finite",
    "One batch with an infinite activation enters a running average for ever. Training does not "
    "show it, since it uses the statistics of the batch; in eval mode the output is not a number.",
    "pytorch#88474, #115500, #90342",
    spoils=True,
)
NEGATIVE = Kind(
    "negative-variance",
    "A running variance is below zero",
    "No data have such a variance: the buffer was changed by arithmetic on weights, such as "
    "subtracting or extrapolating checkpoints. The root of it is not a number, or eps hides it.",
    "estimation-shift, eq. 3",
    spoils=True,
)
NARROW = Kind(
    "narrow-statistics",
    "Running statistics have a narrow number type",
    "A running average moves by momentum times a difference. In half precision steps below half a "
    "unit in the last place round to nothing, so the average stops short of the statistics; a "
    "variance above 65,504 is infinite in float16.",
    "pytorch#88929, torchtitan#674",
)
LEFT_OUT = Kind(
    "nonfinite-batches",
    "Batches were left out because they were not finite",
    "normkit keeps batches with infinite or NaN statistics out of the running ones, so no harm is "
    "done to them. But activations overflow in training, and weights may be next.",
    "pytorch#88474",
)
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


def nonfinite_statistics(evidence: Evidence, earlier: EarlierFindings) -> Iterator[Finding]:
    unexplained = [x for x in evidence.layers if x.path not in earlier.spoiled]
    bad = {x: _nonfinite_channels(x) for x in unexplained}
    layers = [x for x, channels in bad.items() if channels]
    if layers:
        channels = sum(bad[x] for x in layers)
        yield POISONED.finding(
            "serious",
            layers,
            f"Running statistics are infinite or NaN in {counted(channels, 'channel')} of "
            f"{places(layers)}.",
            remedy=evidence.calibrating,
            channels=channels,
            layers=len(layers),
        )


def _nonfinite_channels(layer: NormEvidence) -> int:
    bad = [~buffer.isfinite() for buffer in layer.running_buffers.values()]
    return int(torch.stack(bad).any(0).sum()) if bad else 0


def negative_variance(evidence: Evidence, earlier: EarlierFindings) -> Iterator[Finding]:
    lowest = {
        layer.path: float(layer.kept.var.min())
        for layer in evidence.running()
        if layer.path not in earlier.spoiled and layer.kept is not None
    }
    below = {path: value for path, value in lowest.items() if value < -1e-6}
    if below:
        worst = min(below, key=lambda path: below[path])
        yield NEGATIVE.finding(
            "serious",
            list(below),
            f"The running variance of {named(worst)} goes down to {below[worst]:.3g}.",
            worst=worst,
            remedy=evidence.calibrating,
            lowest=below[worst],
            layers=len(below),
        )


def narrow_types(evidence: Evidence, earlier: EarlierFindings) -> Iterator[Finding]:
    means = {layer: layer.buffer("running_mean") for layer in evidence.layers if layer.kept}
    kinds = {layer: mean.dtype for layer, mean in means.items() if mean is not None}
    layers = [x for x, kind in kinds.items() if kind in (torch.float16, torch.bfloat16)]
    if not layers:
        return
    kind = kinds[layers[0]]
    momentum = layers[0].momentum or 0.1
    lost = torch.finfo(kind).eps / 2 / momentum
    moving = evidence.model.training and any(layer.learns for layer in layers)
    name = str(kind).removeprefix("torch.")
    yield NARROW.finding(
        "warning" if moving else "note",
        layers,
        f"The statistics of {places(layers)} are {name}: a change below {lost:.1%} is lost"
        + ("." if moving else ", which matters if the model is trained further."),
        remedy=f"[model.get_submodule(path).float() for path in {listed(layers)}]"
        if len(layers) > 1
        else f"{layers[0].code}.float()",
        dtype=name,
        lost_below=lost,
        layers=len(layers),
    )


def nonfinite_batches(evidence: Evidence, earlier: EarlierFindings) -> Iterator[Finding]:
    counts = {layer.path: layer.buffer("nonfinite_batches") for layer in evidence.layers}
    bad = {path: int(count) for path, count in counts.items() if count is not None and int(count)}
    if bad:
        worst = max(bad, key=lambda path: bad[path])
        yield LEFT_OUT.finding(
            "warning",
            list(bad),
            f"{named(worst)} has left out {counted(bad[worst], 'batch')} with statistics that were "
            "not finite.",
            worst=worst,
            remedy="torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # before each step",
            batches=bad[worst],
            layers=len(bad),
        )


def moving_average(evidence: Evidence, earlier: EarlierFindings) -> Iterator[Finding]:
    live = evidence.ema_of
    if live is None:
        return
    off = []
    for layer in evidence.running():
        theirs = statistics_in(live, layer)
        if (
            layer.path in earlier.spoiled
            or not layer.learns
            or theirs is None
            or layer.kept is None
        ):
            continue
        wrong = layer.at_start or not layer.fits(OFF)
        if wrong and layer.distance(layer.kept, theirs) > FITS:
            off.append(layer)
    if off:
        worst = max(off, key=lambda layer: layer.error)
        yield EMA.finding(
            evidence.severity(off),
            off,
            f"The statistics of {places(off)} are neither those of the live "
            f"model nor of the averaged weights: the output of {named(worst.path)} is off by "
            f"{worst.error:.2f}. It has counted {worst.count} batches, the live model "
            f"{_count(live, worst)}.",
            worst=worst,
            remedy=evidence.calibrating,
            output_error=worst.error,
            batches=worst.count,
            batches_live=_count(live, worst),
            layers=len(off),
        )


def rank_disagreement(evidence: Evidence, earlier: EarlierFindings) -> Iterator[Finding]:
    if len(evidence.ranks) < 2:
        return
    if names := _different_weights(evidence):
        yield DIVERGED.finding(
            "serious",
            [],
            f"The weights of {counted(len(names), 'parameter')} differ between the "
            f"{len(evidence.ranks)} ranks, first in {names[0]}.",
            remedy="model.load_state_dict(ranks[0])"
            "  # in all processes, and train on in DistributedDataParallel",
            parameters=len(names),
        )
    far: dict[NormEvidence, tuple[float, float]] = {}
    for layer in evidence.running():
        each = [statistics_in(state, layer) for state in evidence.ranks]
        ranks = [x for x in each if x is not None]
        if layer.frozen or len(ranks) < 2:
            continue
        error, bound = _disagreement(layer, ranks), _by_chance(layer)
        if error > bound:
            far[layer] = error, bound
    if far:
        worst = max(far, key=lambda layer: far[layer][0])
        error, bound = far[worst]
        yield RANKS.finding(
            "serious" if error >= WRONG else "warning",
            list(far),
            f"The statistics of {named(worst.path)} differ between {len(evidence.ranks)} ranks: "
            f"used for what all ranks see, those of one put the output off by {error:.2f}.",
            worst=worst,
            remedy=f"{evidence.calibrating}  # in one process, for all",
            disagreement=error,
            by_chance=bound,
            ranks=len(evidence.ranks),
            layers=len(far),
        )


def statistics_in(state: State, layer: NormEvidence) -> Moments | None:
    """The running statistics of a layer in a state_dict, as mean and variance (1, K)."""
    values = {name: state_value(state, f"{layer.prefix}{name}") for name in layer.running_buffers}
    buffers = {name: value for name, value in values.items() if value is not None}
    if layer.kept is None or len(buffers) < 2:
        return None
    buffers = layer.statistics.source.of_domain(buffers)
    mean, var = layer.statistics.source.decode_statistics(buffers)
    device = layer.kept.mean.device
    return Moments(mean[None].to(device), var[None].to(device), 1)


def _disagreement(layer: NormEvidence, ranks: list[Moments]) -> float:
    """The largest output error of one rank's statistics where those of all are right."""
    together = Moments(
        torch.cat([x.mean for x in ranks]), torch.cat([x.var for x in ranks]), 1
    ).pooled(samples=None)
    return max(layer.distance(each, together) for each in ranks)


def _by_chance(layer: NormEvidence) -> float:
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


def _count(state: State, layer: NormEvidence) -> int | None:
    name = "num_batches_tracked"
    counter = state_value(state, f"{layer.prefix}{name}")
    if counter is None:
        return None
    return int(layer.statistics.source.of_domain({name: counter})[name])


def state_value(state: State, key: str) -> Tensor | None:
    """A tensor of a state_dict, also of one that a wrapper has put a word before."""
    for name in (key, f"module.{key}", f"_orig_mod.{key}"):
        if isinstance(value := state.get(name), Tensor):
            return value.detach()
    return None
