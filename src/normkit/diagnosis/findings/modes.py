"""Norms that are in another mode than the model."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import Tensor, nn

from normkit.diagnosis.batches import Batch, output_of
from normkit.diagnosis.findings.evidence import Evidence
from normkit.diagnosis.findings.finding import Finding, Kind, listed, places
from normkit.diagnosis.findings.known import Known
from normkit.diagnosis.findings.layer import Layer
from normkit.diagnosis.findings.mixing import halved
from normkit.diagnosis.switching import using_batch
from normkit.errors import NormkitError
from normkit.inspection import undisturbed

DEPENDS = 3e-4
"""Relative change of the output that is more than rounding: √ of float32's resolution."""

IN_TRAINING = Kind(
    "norm-in-train-mode",
    "Norms are in training mode while the model is in eval mode",
    "They normalize with the statistics of the batch: what a sample gets depends on the others, a "
    "score on a test set uses the test set, and running statistics change while evaluating.",
    "GACNet#8, HiDDeN#13, UFold#18",
)
UNTRACKED = Kind(
    "batch-dependent-eval",
    "In eval mode the output of a sample depends on the batch",
    "These norms keep no running statistics and use those of the batch for ever. A single sample "
    "has none, and a batch of other composition gives other results.",
    "finetuning-scheduler#13; Huang et al. 2022 (estimation-shift), section 1",
)
FRAGILE = Kind(
    "fragile-freeze",
    "The next train() unfreezes norms",
    "They are in eval mode while the model is in training mode. As soon as model.train() is called "
    "again, as every loop does after a validation, their statistics move.",
    "gt-pyg#112, mmsegmentation#362, torch/nn#873",
)


def modes(evidence: Evidence, known: Known) -> Iterator[Finding]:
    ran = [x for x in evidence.layers if x.own is not None]
    pooling = [x for x in ran if x.pools]
    training = evidence.model.training
    left = [x for x in pooling if x.site.tracked and x.norm.training and not training]
    bare = [x for x in pooling if not x.site.tracked]
    yield from _dependent(IN_TRAINING, left, evidence, "model.eval()")
    where = listed([x.path for x in bare])
    yield from _dependent(
        UNTRACKED, bare, evidence, f"nk.convert(model, 'gn', where={where})  # and train on"
    )
    fixed = [x for x in ran if training and x.learns and not x.norm.training]
    if fixed:
        paths = [x.path for x in fixed]
        yield FRAGILE.found(
            "warning",
            paths,
            f"The next train() takes {places(paths)} out of eval mode.",
            remedy=f"nk.freeze(model, 'statistics', where={listed(paths)})",
            layers=len(fixed),
        )


def _dependent(
    kind: Kind, layers: list[Layer], evidence: Evidence, remedy: str
) -> Iterator[Finding]:
    if not layers:
        return
    change = dependence(evidence.model, evidence.batches[0], [x.norm for x in layers])
    if change <= DEPENDS:
        return
    paths = [x.path for x in layers]
    measured = (
        "" if math.isnan(change) else f": without half of it the output changes by {change:.1%}"
    )
    yield kind.found(
        "serious",
        paths,
        f"The statistics of the batch are used in eval mode at {places(paths)}{measured}.",
        remedy=remedy,
        change=change,
        layers=len(layers),
    )


def dependence(model: nn.Module, batch: Batch, training: list[nn.Module]) -> float:
    """How far the output of samples changes if the other half of their batch is missing.

    Relative to the size of the output; NaN if the batch cannot be cut.
    """
    half = halved(batch.inputs, batch.size)
    if half is None:
        return math.nan
    outputs = []
    for inputs in (batch.inputs, half):
        with undisturbed(model), using_batch(training):
            try:
                outputs.append(output_of(model, Batch(inputs, None), 1))
            except NormkitError:
                return math.nan
    whole, part = outputs
    if not isinstance(whole, Tensor) or not isinstance(part, Tensor) or whole.dim() == 0:
        return math.nan
    same = whole[: len(part)].double()
    size = float(same.square().mean().sqrt())
    return float((same - part).abs().max()) / size if size > 0 else math.nan


EXAMINERS = (modes,)
KINDS = (IN_TRAINING, UNTRACKED, FRAGILE)
