"""Buffers that hold what no statistics can be."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from normkit.core.messages import counted
from normkit.diagnosis.findings.evidence import Evidence
from normkit.diagnosis.findings.finding import Finding, Kind, listed, named, places
from normkit.diagnosis.findings.known import Known
from normkit.diagnosis.findings.layer import Layer
from normkit.diagnosis.findings.norm_facts import finite

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


def poisoned(evidence: Evidence, known: Known) -> Iterator[Finding]:
    all_of = [x for x in evidence.layers if x.path not in known.spoiled]
    layers = [x for x in all_of if not finite(x.buffer("running_mean"))]
    layers += [x for x in all_of if not finite(x.buffer(x.second)) and x not in layers]
    if layers:
        paths = [layer.path for layer in layers]
        channels = sum(map(_poisoned_channels, layers))
        yield POISONED.found(
            "serious",
            paths,
            f"Running statistics are infinite or NaN in {counted(channels, 'channel')} of "
            f"{places(paths)}.",
            remedy=evidence.calibrating,
            channels=channels,
            layers=len(layers),
        )


def _poisoned_channels(layer: Layer) -> int:
    found = [layer.buffer("running_mean"), layer.buffer(layer.second)]
    bad = [~torch.isfinite(each) for each in found if each is not None]
    return int(torch.stack(bad).any(0).sum()) if bad else 0


def negative(evidence: Evidence, known: Known) -> Iterator[Finding]:
    lowest = {
        layer.path: float(layer.kept.var.min())
        for layer in evidence.running()
        if layer.path not in known.spoiled and layer.kept is not None
    }
    below = {path: value for path, value in lowest.items() if value < -1e-6}
    if below:
        worst = min(below, key=lambda path: below[path])
        yield NEGATIVE.found(
            "serious",
            list(below),
            f"The running variance of {named(worst)} goes down to {below[worst]:.3g}.",
            worst=worst,
            remedy=evidence.calibrating,
            lowest=below[worst],
            layers=len(below),
        )


def narrow(evidence: Evidence, known: Known) -> Iterator[Finding]:
    means = {layer: layer.buffer("running_mean") for layer in evidence.layers if layer.kept}
    kinds = {layer: mean.dtype for layer, mean in means.items() if mean is not None}
    layers = [x for x, kind in kinds.items() if kind in (torch.float16, torch.bfloat16)]
    if not layers:
        return
    paths = [layer.path for layer in layers]
    kind = kinds[layers[0]]
    momentum = layers[0].momentum or 0.1
    lost = torch.finfo(kind).eps / 2 / momentum
    moving = evidence.model.training and any(layer.learns for layer in layers)
    name = str(kind).removeprefix("torch.")
    yield NARROW.found(
        "warning" if moving else "note",
        paths,
        f"The statistics of {places(paths)} are {name}: a change below {lost:.1%} is lost"
        + ("." if moving else ", which matters if the model is trained further."),
        remedy=f"[model.get_submodule(path).float() for path in {listed([*paths])}]"
        if len(paths) > 1
        else f"{layers[0].code}.float()",
        dtype=name,
        lost_below=lost,
        layers=len(layers),
    )


def left_out(evidence: Evidence, known: Known) -> Iterator[Finding]:
    counts = {layer.path: layer.buffer("nonfinite_batches") for layer in evidence.layers}
    bad = {path: int(count) for path, count in counts.items() if count is not None and int(count)}
    if bad:
        worst = max(bad, key=lambda path: bad[path])
        yield LEFT_OUT.found(
            "warning",
            list(bad),
            f"{named(worst)} has left out {counted(bad[worst], 'batch')} with statistics that were "
            "not finite.",
            worst=worst,
            remedy="torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # before each step",
            batches=bad[worst],
            layers=len(bad),
        )


EXAMINERS = (poisoned, negative, narrow, left_out)
KINDS = (POISONED, NEGATIVE, NARROW, LEFT_OUT)
