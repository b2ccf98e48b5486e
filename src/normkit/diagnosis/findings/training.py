"""What the batches of training do to batch statistics."""

from __future__ import annotations

from collections.abc import Iterator

from normkit.diagnosis.findings.bounds import FEW_IMAGES, FEW_VALUES, MANY_VALUES
from normkit.diagnosis.findings.data import BATCHES, Data, chance_of
from normkit.diagnosis.findings.evidence import Evidence
from normkit.diagnosis.findings.finding import Finding, Kind, named, places
from normkit.diagnosis.findings.known import Known
from normkit.diagnosis.findings.layer import Layer

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
MANY = 5.0
"""Standard errors above 1: a ratio of variances has a long tail."""


def batches(evidence: Evidence, known: Known) -> Iterator[Finding]:
    pooling = [x for x in evidence.layers if x.pools and not x.frozen and x.own is not None]
    if evidence.train_data is None or not pooling:
        return
    yield from _last(evidence, pooling)
    yield from _tiny(evidence, pooling)
    yield from _sorted(evidence, pooling)


def _last(evidence: Evidence, pooling: list[Layer]) -> Iterator[Finding]:
    data = evidence.train_data
    assert data is not None
    if data.last_size != 1 or data.batch_size == 1:
        return
    alone = [x for x in pooling if x.own and x.own.shape and x.own.shape[2:].numel() == 1]
    yield LAST_OF_ONE.found(
        "serious" if alone else "warning",
        [x.path for x in alone or pooling],
        f"{data.samples} samples in batches of {data.batch_size} leave 1 for the last"
        + (f": {places([x.path for x in alone])} will raise an error." if alone else "."),
        worst=alone[0].path if alone else "",
        remedy=_again(data),
        samples=data.samples,
        batch_size=data.batch_size,
        fails=bool(alone),
    )


def _tiny(evidence: Evidence, pooling: list[Layer]) -> Iterator[Finding]:
    values = {
        x: x.values(x.trained)
        for x in pooling
        if x.trained and len(x.trained.of_batches) >= BATCHES and not x.measured.for_small_batches
    }
    assert evidence.train_data is not None
    size = evidence.train_data.batch_size or 0
    bound = MANY_VALUES if size <= FEW_IMAGES else FEW_VALUES
    few = [x for x, count in values.items() if count < bound]
    if not few:
        return
    worst = min(few, key=lambda layer: values[layer])
    yield TINY.found(
        "serious" if values[worst] < FEW_VALUES else "warning",
        [x.path for x in few],
        f"With batches of {size} the statistics of {named(worst.path)} are as noisy as those of "
        f"{values[worst]:.1f} independent values.",
        worst=worst.path,
        remedy="nk.convert(model, 'gn')  # and train on; its statistics are of each sample",
        independent_values=values[worst],
        batch_size=size,
        layers=len(few),
    )


def _again(data: Data) -> str:
    """The code of a loader that shuffles, and leaves out an incomplete batch."""
    new, how = "train_loader = torch.utils.data.DataLoader(", "shuffle=True, drop_last=True)"
    if data.dataset:
        return f"{new}train_loader.dataset, train_loader.batch_size, {how}"
    return (
        "train_data = torch.utils.data.TensorDataset(*map(torch.cat, zip(*train_loader))); "
        f"{new}train_data, {data.batch_size}, {how}"
    )


def _sorted(evidence: Evidence, pooling: list[Layer]) -> Iterator[Finding]:
    data = evidence.train_data
    assert data is not None
    bound = 1 + MANY * chance_of(data.compared)
    if not data.between > bound:
        return
    yield SORTED.found(
        "warning",
        [x.path for x in pooling],
        f"The means of {data.compared} batches vary {data.between:.1f} times as much as those of "
        f"random batches would; up to {bound:.1f} may be chance.",
        worst="",
        remedy=_again(data),
        between=data.between,
        bound=bound,
        batches=data.compared,
    )


EXAMINERS = (batches,)
KINDS = (LAST_OF_ONE, TINY, SORTED)
