"""Running statistics that never left their start, in layers that say why."""

from __future__ import annotations

from collections.abc import Iterator

from normkit.diagnosis.findings.at_start import STANDSTILL, at_start
from normkit.diagnosis.findings.bounds import OFF
from normkit.diagnosis.findings.evidence import Evidence
from normkit.diagnosis.findings.finding import Finding, Kind, listed
from normkit.diagnosis.findings.known import Known
from normkit.diagnosis.findings.layer import Layer
from normkit.layers.measured import Refusal

UNSET_RATE = Kind(
    "update-rate-zero",
    "Estimates of micro-batch bcn do not move",
    "bcn for micro batches normalizes with running estimates that move at the learning rate; the "
    "released class leaves that rate at 0, so that nothing is normalized by statistics of data.",
    "Qiao et al. 2019 (ws-bcn), algorithm 1",
    spoils=True,
)
FROZEN_EARLY = Kind(
    "ubn-frozen-early",
    "A ubn has frozen before its statistics were ripe",
    "Once the score of a ubn is below tau it uses its running statistics and never changes them "
    "again. If that happens in the first batches they are mostly start values.",
    "Wang et al. 2024 (ubn), eq. 3",
    spoils=True,
)
MOMENTUM_ZERO = Kind(
    "momentum-zero",
    "Momentum 0 keeps running statistics at their start",
    "momentum is the weight of the new batch in torch, of the old value in some other libraries. "
    f"With 0 batches are counted but never enter. {STANDSTILL}",
    "estimation-shift, eq. 3",
    spoils=True,
)
FROZEN_AT_START = Kind(
    "frozen-at-start",
    "A norm is frozen at its initial statistics",
    "Freezing is for layers that come with statistics of a pretrained model. Frozen at the start "
    "a batch norm is switched off, and the network trains without normalization.",
    "transformers#27160; frozen batch norm of the detection tables in ubn and estimation-shift",
    spoils=True,
)


def still(evidence: Evidence, known: Known) -> Iterator[Finding]:
    layers = [x for x in evidence.running() if x.own is not None and x.path not in known.spoiled]
    yield from _unset_rate(evidence, [x for x in layers if x.measured.follows_learning_rate])
    early = [x for x in layers if _is_below_threshold(x) and (x.at_start or x.error >= OFF)]
    if early:
        yield at_start(
            FROZEN_EARLY,
            early,
            evidence,
            "froze",
            evidence.calibrating,
            because=", the score being below tau",
        )
    momentum = [x for x in layers if x.learns and x.momentum == 0 and x.at_start]
    if momentum and not all(x.measured.affine_at_start() for x in momentum):
        yield at_start(
            MOMENTUM_ZERO,
            momentum,
            evidence,
            "stay",
            f"[setattr(m, 'momentum', 0.1) for m in model.modules() "
            f"if getattr(m, 'momentum', None) == 0]; {evidence.calibrating}",
            because=", with momentum 0",
        )
    held = [x for x in layers if x.frozen and x.at_start]
    if held:
        paths = [x.path for x in held]
        yield at_start(
            FROZEN_AT_START,
            held,
            evidence,
            "are frozen",
            f"nk.convert(model, 'bn', where={listed(paths)})  # and train on",
        )


def _unset_rate(evidence: Evidence, micro: list[Layer]) -> Iterator[Finding]:
    rates = {x.path: float(x.buffer("rate")) for x in micro}  # type: ignore[arg-type]
    bad = [x for x in micro if not rates[x.path] > 0 and (x.at_start or x.error >= OFF)]
    if bad:
        follow = "nk.follow_learning_rate(model, optimizer)"
        each = f"[m.set_update_rate(0.01) for m in [{', '.join(x.code for x in bad)}]]"
        yield at_start(
            UNSET_RATE,
            bad,
            evidence,
            "stay",
            f"{each if evidence.optimizer is None else follow}; {evidence.calibrating}",
            because=", with update rate 0",
        )


def _is_below_threshold(layer: Layer) -> bool:
    threshold = layer.measured.threshold()
    return not isinstance(threshold, Refusal) and bool(threshold[0])


EXAMINERS = (still,)
KINDS = (UNSET_RATE, FROZEN_EARLY, MOMENTUM_ZERO, FROZEN_AT_START)
