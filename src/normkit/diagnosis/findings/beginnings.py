"""Running statistics that never left their start, in layers that do not say why."""

from __future__ import annotations

from collections.abc import Iterator

from normkit.diagnosis.findings.at_start import STANDSTILL, at_start
from normkit.diagnosis.findings.evidence import Evidence
from normkit.diagnosis.findings.finding import Finding, Kind
from normkit.diagnosis.findings.known import Known
from normkit.diagnosis.findings.layer import Layer

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


def blank(evidence: Evidence, known: Known) -> Iterator[Finding]:
    """Judged together: what all layers have in common shows what happened."""
    learning = [x for x in evidence.running() if x.learns and x.own is not None]
    layers = [x for x in learning if x.at_start and x.path not in known.spoiled]
    if not layers:
        return
    everywhere = len(layers) == len(learning)
    counted = any(x.count for x in layers)
    if everywhere and not counted and all(x.measured.affine_at_start() for x in layers):
        yield at_start(UNTRAINED, layers, evidence, "are", "model.train()  # and train it", "note")
    elif not everywhere and not counted:
        yield at_start(NEVER_UPDATED, layers, evidence, "are still", evidence.repairing)
    else:
        yield _told_by_losses(evidence, layers)


def _told_by_losses(evidence: Evidence, layers: list[Layer]) -> Finding:
    gap = evidence.gap
    if gap is not None and gap.sure and gap.difference < 0:
        return at_start(
            EVAL_TRAINED,
            layers,
            evidence,
            "are",
            "model.train()  # and train again; do not calibrate, the weights fit the start values",
            because=f", and give a loss of {gap.eval:.3g}, those of batches {gap.batch:.3g}",
        )
    missing = ""
    if gap is None or not gap.sure:
        missing = (
            "Losses would tell this from training in eval mode: give batches (x, y), or loss=."
        )
    return at_start(LOST, layers, evidence, "are", evidence.calibrating, missing=missing)


EXAMINERS = (blank,)
KINDS = (EVAL_TRAINED, LOST, NEVER_UPDATED, UNTRAINED)
