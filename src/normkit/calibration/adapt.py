"""adapt: statistics for data that differ from what a model was trained on, with a guard."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from normkit.calibration.apply import chosen_norms
from normkit.calibration.calibrate import Metric, change_statistics, check_mode, reader_of
from normkit.calibration.measuring import Measurement
from normkit.calibration.result import Calibration, LayerChange
from normkit.errors import OptionError
from normkit.inspection import undisturbed
from normkit.inspection.batches import BatchReader, Forward, tensors_in

FLAT = 0.1  # a standard deviation that has shrunk to this share counts as lost
MOST = 0.5  # of a layer's channels lost: then the layer is
VARIETY = 0.5  # of the effective number of predicted classes that has to stay
BATCHES = 8  # that are looked at


def adapt(
    model: nn.Module,
    batches: Any,
    *,
    prior: float = 16.0,
    where: Any = None,
    mode: str = "progressive",
    together: bool = False,
    images: int | None = None,
    forward: Forward | None = None,
    guard: bool = True,
    metric: Metric | None = None,
    higher_is_better: bool = True,
    frozen: bool = False,
    note: str = "",
) -> Calibration:
    """Adapt the running statistics of a model to shifted data, without labels or training.

    The statistics become those of the data and of ``prior`` images with the model's present
    statistics, merged: prior=0 is AdaBN, which takes the new ones alone; with few images a prior
    of about 16 steadies them; a large one changes little. The variance of the mixture contains
    the distance between the two means. Otherwise as ``calibrate``.

    The guard takes the adaptation back if the model has collapsed: if most channels of a layer
    hardly vary on the data, as on blank images, or if a classifier's predictions concentrate on
    less than half as many classes, in effect, as before. Read ``.kept`` and ``.why_not``, or print
    the result. It cannot see that all data are of one class, which adaptation makes worse: mix
    the classes, or give a ``metric``.

    >>> import torch, normkit as nk
    >>> model = torch.nn.Sequential(torch.nn.BatchNorm1d(1))  # mean 0, variance 1
    >>> done = nk.adapt(model, torch.full((48, 1), 4.0) + torch.randn(48, 1), prior=16)
    >>> model[0].running_mean.round().item()  # 48 of 64 parts of 4
    3.0
    """
    if not (math.isfinite(prior) and prior >= 0):
        raise OptionError(f"adapt expects prior to be a number of images ≥ 0, got {prior!r}.")
    norms, left = chosen_norms(model, where, frozen)
    reader = reader_of(model, batches, forward, images)
    check_mode(mode, together)
    reader.keep()
    before = effective_classes(reader) if guard else None

    def check(layers: Sequence[LayerChange]) -> str | None:
        if not guard:
            return None
        return lost_layer(layers) or lost_classes(before, effective_classes(reader))

    return change_statistics(
        Measurement(reader, norms),
        left,
        mode=mode,
        together=together,
        prior=prior,
        metric=metric,
        higher_is_better=higher_is_better,
        note=note,
        what="adapted",
        check=check,
    )


def effective_classes(reader: BatchReader) -> float | None:
    """How many classes a model predicts for the first few batches: the exponential of the entropy
    of its mean prediction. None if the output is not one row of scores a sample."""
    total: Tensor | None = None
    rows = 0
    with undisturbed(reader.model):
        for number, batch in enumerate(islice(reader, BATCHES), 1):
            scores = _scores(reader.run(batch, number))
            if scores is None:
                return None
            summed = torch.softmax(scores.to(torch.float64), 1).sum(0)
            total = summed if total is None else total + summed
            rows += scores.shape[0]
    if total is None or rows < 2:
        return None
    share = total / rows
    return math.exp(-(share * torch.log(share.clamp(min=1e-300))).sum().item())


def lost_layer(layers: Sequence[LayerChange]) -> str | None:
    """A layer most of whose channels hardly vary any more, as on blank images; None if there is
    none. It would be divided by next to nothing, and amplify noise."""
    for layer in layers:
        old, new = layer.before[1].clamp(min=0), layer.after[1].clamp(min=0)
        alive = old > layer.eps
        flat = (new < old * FLAT**2) & alive
        if alive.any() and flat.sum() > MOST * alive.sum():
            return (
                f"the data hardly vary at {layer.path or 'the norm'}: {int(flat.sum())} of "
                f"{int(alive.sum())} channels have less than {FLAT:.0%} of their former deviation"
            )
    return None


def lost_classes(before: float | None, after: float | None) -> str | None:
    """Why the predictions have collapsed; None if they have not."""
    if before is None or after is None:
        return None
    if not math.isfinite(after):
        return "the outputs are not finite any more"
    if after < VARIETY * before:
        return (
            f"the predictions have collapsed: {before:.1f} classes in effect before, "
            f"{after:.1f} after"
        )
    return None


def _scores(output: Any) -> Tensor | None:
    """The scores (N, K) of a classifier, if the output is that."""
    first = next(tensors_in(output), None)
    if first is None or first.dim() != 2 or first.shape[1] < 2 or not first.is_floating_point():
        return None
    return first
