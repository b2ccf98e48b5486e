"""Running statistics that never left their start."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from normkit.diagnosis.findings.bounds import OFF
from normkit.diagnosis.findings.evidence import Evidence
from normkit.diagnosis.findings.finding import (
    EarlierFindings,
    Finding,
    Kind,
    conversion,
    named,
    places,
)
from normkit.diagnosis.findings.norm import NormEvidence
from normkit.layers.measured import Refusal

AT_START = "mean 0 and variance 1"
STANDSTILL = "A norm in eval mode then only rescales: what training normalized is not normalized."
UNSET_RATE = Kind(
    "update-rate-zero",
    "Estimates that follow the learning rate do not move",
    "For micro batches a layer normalizes with running estimates that move at the learning rate. "
    "While that rate is 0, as in the released class, no statistics of data normalize anything.",
    "Qiao et al. 2019 (ws-bcn), algorithm 1",
    spoils=True,
)
FROZEN_EARLY = Kind(
    "ubn-frozen-early",
    "A layer has frozen before its statistics were ripe",
    "Once its score is below tau a layer uses its running statistics and never changes them "
    "again. If that happens in the first batches they are mostly start values.",
    "Wang et al. 2024 (ubn), eq. 3",
    spoils=True,
    brings=("dead-channels", "eps-dominates"),
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
EVAL_TRAINED = Kind(
    "eval-trained",
    "The model was trained in eval mode",
    "The weights fit the initial statistics: the loss is low with those and high with statistics "
    "of batches. The network was trained without normalization; new statistics would break it.",
    "pytorch#4741; Huang et al. 2022 (estimation-shift), section 4",
    spoils=True,
)
LOST = Kind(
    "lost-statistics",
    "Weights are trained, running statistics are not",
    "Weights were loaded or copied without buffers, as with named_parameters() or strict=False, "
    f"or the statistics were reset. {STANDSTILL}",
    "peft#1732, tf-frrn#2; Huang et al. 2022 (estimation-shift), section 4",
    spoils=True,
)
NEVER_UPDATED = Kind(
    "never-updated",
    "Some norms have never seen a batch in training mode",
    "They were in eval mode while the rest was trained, or were added later. " + STANDSTILL,
    "chemprop#952, mmsegmentation#362; Huang et al. 2022 (estimation-shift), section 4",
    spoils=True,
)
UNTRAINED = Kind(
    "untrained",
    "The model looks untrained",
    "Weights and statistics of all norms are what new layers have, so there is little to diagnose.",
    "",
    spoils=True,
)


def at_start(
    kind: Kind,
    layers: Sequence[NormEvidence],
    evidence: Evidence,
    verb: str,
    remedy: str,
    severity: str = "serious",
    because: str = "",
    missing: str = "",
) -> Finding:
    measured = [x for x in layers if not math.isnan(x.error)]
    worst = max(measured, key=lambda layer: layer.error, default=layers[0])
    gap = evidence.gap
    count = max((x.count or 0 for x in layers), default=0)
    after = f" after {count} batches" if count else ""
    values = AT_START if all(x.at_start for x in layers) else "values that do not fit"
    return kind.finding(
        severity,
        layers,
        f"The statistics of {places(layers)} {verb} at {values}{after}{because}; on the data they "
        f"put the output of {named(worst.path)} off by {worst.error:.2f}, where 1 is "
        "the size of the output itself.",
        worst=worst,
        remedy=remedy,
        missing=missing,
        output_error=None if math.isnan(worst.error) else worst.error,
        batches_counted=count,
        layers=len(layers),
        loss_eval=None if gap is None else gap.eval,
        loss_batch=None if gap is None else gap.batch,
    )


def held_at_start(evidence: Evidence, earlier: EarlierFindings) -> Iterator[Finding]:
    layers = [x for x in evidence.running() if x.own is not None and x.path not in earlier.spoiled]
    wrong = [x for x in layers if x.at_start or x.error >= OFF]
    rates = {x: x.measured.followed_rate() for x in wrong}
    still = [x for x, rate in rates.items() if rate is not None and not rate > 0]
    if still:
        follow = "nk.follow_learning_rate(model, optimizer)"
        each = f"[m.set_update_rate(0.01) for m in [{', '.join(x.code for x in still)}]]"
        yield at_start(
            UNSET_RATE,
            still,
            evidence,
            "stay",
            f"{each if evidence.optimizer is None else follow}; {evidence.calibrating}",
            because=", with update rate 0",
        )
    thresholds = {x: x.measured.threshold() for x in wrong}
    early = [x for x, t in thresholds.items() if not isinstance(t, Refusal) and bool(t[0])]
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
        yield at_start(
            FROZEN_AT_START,
            held,
            evidence,
            "are frozen",
            f"{conversion(FROZEN_AT_START, held)}  # and train on",
        )


def never_moved(evidence: Evidence, earlier: EarlierFindings) -> Iterator[Finding]:
    """Judged together: what all layers have in common shows what happened."""
    learning = [x for x in evidence.running() if x.learns and x.own is not None]
    layers = [x for x in learning if x.at_start and x.path not in earlier.spoiled]
    if not layers:
        return
    everywhere = len(layers) == len(learning)
    counted = any(x.count for x in layers)
    if everywhere and not counted and all(x.measured.affine_at_start() for x in layers):
        yield at_start(UNTRAINED, layers, evidence, "are", "model.train()  # and train it", "note")
    elif not everywhere and not counted:
        yield at_start(NEVER_UPDATED, layers, evidence, "are still", evidence.repairing)
    elif (gap := evidence.gap) is not None and gap.sure and gap.difference < 0:
        yield at_start(
            EVAL_TRAINED,
            layers,
            evidence,
            "are",
            "model.train()  # and train again; do not calibrate, the weights fit the start values",
            because=f", and give a loss of {gap.eval:.3g}, those of batches {gap.batch:.3g}",
        )
    else:
        wanted = "Losses would tell this from training in eval mode: give batches (x, y), or loss=."
        missing = "" if gap is not None and gap.sure else wanted
        yield at_start(LOST, layers, evidence, "are", evidence.calibrating, missing=missing)
