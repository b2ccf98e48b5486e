"""What the batches of training do to batch statistics, and norms in another mode than the model."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from normkit.diagnosis.findings.bounds import (
    FEW_IMAGES,
    FEW_VALUES,
    MANY_VALUES,
    OFF,
    sampling_error,
)
from normkit.diagnosis.findings.data import BATCHES, LoaderFacts, chance_of, halved
from normkit.diagnosis.findings.evidence import Evidence
from normkit.diagnosis.findings.finding import (
    EarlierFindings,
    Finding,
    Kind,
    conversion,
    listed,
    named,
    places,
)
from normkit.diagnosis.findings.norm import NormEvidence
from normkit.diagnosis.observe.passes import using_batch
from normkit.errors import NormkitError
from normkit.inspection import undisturbed
from normkit.inspection.batches import LoaderBatch, run_batch

LAST_OF_ONE = Kind(
    "last-batch-of-one",
    "The last batch of an epoch is a single sample",
    "A channel with a single value has no variance, so batch norm fails at the end of the epoch; "
    "with several positions it trains on the statistics of that one sample.",
    "fastai#1352, mmpretrain#1421, litData#442",
)
TINY = Kind(
    "tiny-batch",
    "Batches are too small for batch statistics",
    "Statistics of few values are noise, which the network is trained with and never meets again "
    "in eval mode: on ImageNet batch norm loses 4 points of accuracy at 4 images and 10 at 2.",
    "Zhou et al. 2020 (bgn), Table 2; Qiao et al. 2019 (ws-bcn)",
)
SORTED = Kind(
    "unshuffled-batches",
    "Batches differ more than random ones would",
    "Data in order, by class or by source, make the statistics of a batch those of its class. The "
    "network learns to use them, and running statistics, which mix all classes, fit no batch.",
    "Huang et al. 2022 (estimation-shift), section 4; Zhou et al. 2020 (bgn), section 2",
)
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
MANY = 5.0
"""Standard errors above 1: a ratio of variances has a long tail."""
DEPENDS = 3e-4
"""Relative change of the output that is more than rounding: √ of float32's resolution."""


def training_batches(evidence: Evidence, earlier: EarlierFindings) -> Iterator[Finding]:
    pooling = [x for x in evidence.layers if x.pools and not x.frozen and x.own is not None]
    if evidence.train_data is None or not pooling:
        return
    yield from _last(evidence.train_data, pooling)
    yield from _tiny(evidence.train_data, pooling)
    yield from _sorted(evidence.train_data, pooling)


def _last(data: LoaderFacts, pooling: list[NormEvidence]) -> Iterator[Finding]:
    if data.last_size != 1 or data.batch_size == 1:
        return
    alone = [x for x in pooling if x.own and x.own.shape and x.own.shape[2:].numel() == 1]
    yield LAST_OF_ONE.finding(
        "serious" if alone else "warning",
        alone or pooling,
        f"{data.samples} samples in batches of {data.batch_size} leave 1 for the last"
        + (f": {places(alone)} will raise an error." if alone else "."),
        worst=alone[0].path if alone else "",
        remedy=_again(data),
        samples=data.samples,
        batch_size=data.batch_size,
        fails=bool(alone),
    )


def _tiny(data: LoaderFacts, pooling: list[NormEvidence]) -> Iterator[Finding]:
    values = {
        x: x.values(x.trained)
        for x in pooling
        if x.trained and len(x.trained.of_batches) >= BATCHES and not x.measured.for_small_batches
    }
    size = data.batch_size or 0
    bound = MANY_VALUES if size <= FEW_IMAGES else FEW_VALUES
    few = [x for x, count in values.items() if count < bound]
    if not few:
        return
    worst = min(few, key=lambda layer: values[layer])
    freezing, facts = _freezing(few, values)
    yield TINY.finding(
        "serious" if values[worst] < FEW_VALUES else "warning",
        few,
        f"With batches of {size} the statistics of {named(worst.path)} are as noisy as those of "
        f"{values[worst]:.1f} independent values.{freezing}",
        worst=worst,
        remedy=f"{conversion(TINY)}  # and train on; its statistics are of each sample",
        independent_values=values[worst],
        batch_size=size,
        layers=len(few),
        **facts,
    )


def _freezing(
    few: list[NormEvidence], values: dict[NormEvidence, float]
) -> tuple[str, dict[str, Any]]:
    """Freeze or not, in a sentence and numbers: which statistics are nearer to those of the data,
    a batch's own, which are right in the mean and noisy, or the running ones, which hold still."""
    pairs = [(sampling_error(values[x]), x.error_on_training) for x in few]
    pairs = [pair for pair in pairs if all(map(math.isfinite, pair))]
    if not pairs:
        return "", {}
    noise, fixed = (statistics.median(column) for column in zip(*pairs, strict=True))
    text = (
        f" In the median of these norms a batch's statistics are off by {noise:.2f}, the running "
        f"ones by {fixed:.2f} of the signal: "
    )
    if fixed > max(noise, OFF):
        nearer = "they do not fit; calibrate them first, if they are to be frozen."
    elif fixed > noise:  # measured at batch 1, 2 and 8 in four domains: docs/fitted-conversion.md
        nearer = (
            "frozen, by nk.freeze(model, 'statistics'), they would be farther off, but hold still, "
            "which has been the better choice."
        )
    else:
        nearer = "frozen, by nk.freeze(model, 'statistics'), they would be nearer."
    return text + nearer, {"batch_error": noise, "running_error": fixed}


def _again(data: LoaderFacts) -> str:
    """The code of a loader that shuffles, and leaves out an incomplete batch."""
    new, how = "train_loader = torch.utils.data.DataLoader(", "shuffle=True, drop_last=True)"
    if data.dataset:
        return f"{new}train_loader.dataset, train_loader.batch_size, {how}"
    return (
        "train_data = torch.utils.data.TensorDataset(*map(torch.cat, zip(*train_loader))); "
        f"{new}train_data, {data.batch_size}, {how}"
    )


def _sorted(data: LoaderFacts, pooling: list[NormEvidence]) -> Iterator[Finding]:
    bound = 1 + MANY * chance_of(data.compared)
    if not data.between > bound:
        return
    yield SORTED.finding(
        "warning",
        pooling,
        f"The means of {data.compared} batches vary {data.between:.1f} times as much as those of "
        f"random batches would; up to {bound:.1f} may be chance.",
        worst="",
        remedy=_again(data),
        between=data.between,
        bound=bound,
        batches=data.compared,
    )


def norm_modes(evidence: Evidence, earlier: EarlierFindings) -> Iterator[Finding]:
    ran = [x for x in evidence.layers if x.own is not None]
    pooling = [x for x in ran if x.pools]
    training = evidence.model.training
    left = [x for x in pooling if x.site.tracked and x.norm.training and not training]
    bare = [x for x in pooling if not x.site.tracked]
    yield from _dependent(IN_TRAINING, left, evidence, "model.eval()")
    yield from _dependent(
        UNTRACKED, bare, evidence, f"{conversion(UNTRACKED, bare)}  # and train on"
    )
    fixed = [x for x in ran if training and x.learns and not x.norm.training]
    if fixed:
        yield FRAGILE.finding(
            "warning",
            fixed,
            f"The next train() takes {places(fixed)} out of eval mode.",
            remedy=f"nk.freeze(model, 'statistics', where={listed(fixed)})",
            layers=len(fixed),
        )


def _dependent(
    kind: Kind, layers: list[NormEvidence], evidence: Evidence, remedy: str
) -> Iterator[Finding]:
    if not layers:
        return
    change = dependence(evidence.model, evidence.batches[0], [x.norm for x in layers])
    if change <= DEPENDS:
        return
    measured = (
        "" if math.isnan(change) else f": without half of it the output changes by {change:.1%}"
    )
    yield kind.finding(
        "serious",
        layers,
        f"The statistics of the batch are used in eval mode at {places(layers)}{measured}.",
        remedy=remedy,
        change=change,
        layers=len(layers),
    )


def dependence(model: nn.Module, batch: LoaderBatch, training: list[nn.Module]) -> float:
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
                outputs.append(run_batch(model, LoaderBatch(inputs), 1))
            except NormkitError:
                return math.nan
    whole, part = outputs
    if not isinstance(whole, Tensor) or not isinstance(part, Tensor) or whole.dim() == 0:
        return math.nan
    same = whole[: len(part)].double()
    size = float(same.square().mean().sqrt())
    return float((same - part).abs().max()) / size if size > 0 else math.nan
