"""adapt: statistics for data that differ from what a model was trained on, with a guard."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from normkit.calibration.apply import chosen_norms
from normkit.calibration.calibrate import Metric, change_statistics, check_mode, reader_of
from normkit.calibration.measuring import InputStatistics, Measurement
from normkit.calibration.result import Calibration, LayerChange
from normkit.core.precision import widest
from normkit.errors import OptionError
from normkit.inspection import undisturbed
from normkit.inspection.batches import BatchReader, Forward, tensors_in

FLAT = 0.03  # of a former deviation, about two gray levels of an image: rounding would be amplified
MOST = 0.5  # of a layer's channels lost: then the layer is
ALIKE = 0.01  # of a channel's deviation, that samples differ by; photographs differ by 0.1 to 1
VARIETY = 0.5  # of the effective number of predicted classes that has to stay
ONE_SIDED = 0.25  # of a model's classes: data with fewer, in effect, are not like those of training
FITS = 0.25  # output error up to which the first norm's data look like those of training
SAMPLES = 16  # least number that can be called one-sided
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

    The guard takes the adaptation back if the data cannot tell what they are distributed like: if
    most channels of a layer hardly vary on them, as on blank images; if samples hardly differ from
    each other, as constant or repeated images; if most images have no contrast of their own,
    however bright each is; or if a classifier takes nearly all for one class
    while the first norm sees nothing new, as with data of one class, whose class adaptation would
    take away. And it does so if predictions concentrate on less than half as many classes, in
    effect, as before. Read ``.kept`` and ``.why_not``, or print the result. Where a class
    shows in the statistics of the first norm, as without convolutions, or where data have shifted
    as well, it cannot see that they are of one class: mix the classes, or give a ``metric``.

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

    def check(measured: Sequence[InputStatistics], layers: Sequence[LayerChange]) -> str | None:
        if not guard:
            return None
        return (
            lost_layer(measured, layers)
            or blank_images(reader)
            or alike_samples(measured[0])
            or one_sided(before, measured[0], layers[0])
            or lost_classes(before, effective_classes(reader))
        )

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


class EffectiveClasses(NamedTuple):
    """How many classes a model predicts, in effect; of how many, and for how many samples."""

    effective: float
    classes: int
    samples: int


def effective_classes(reader: BatchReader) -> EffectiveClasses | None:
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
    effective = math.exp(-(share * torch.log(share.clamp(min=1e-300))).sum().item())
    return EffectiveClasses(effective, len(share), rows)


def lost_layer(measured: Sequence[InputStatistics], layers: Sequence[LayerChange]) -> str | None:
    """A layer most of whose channels hardly vary on the data, as on blank images; None if there is
    none. It would be divided by next to nothing, and amplify noise. The data are judged alone: in
    the mixture with a prior the prior would hide it."""
    for one, layer in zip(measured, layers, strict=True):
        assert one.merged is not None
        old, new = layer.before[1].clamp(min=0), one.merged.var.to(layer.before[1])
        alive = old > layer.eps
        flat = (new < old * FLAT**2) & alive
        if alive.any() and flat.sum() > MOST * alive.sum():
            return (
                f"the data hardly vary at {layer.path or 'the norm'}: {int(flat.sum())} of "
                f"{int(alive.sum())} channels have less than {FLAT:.0%} of their former deviation"
            )
    return None


def blank_images(reader: BatchReader) -> str | None:
    """Why the images show nothing, each constant or nearly so; None if most show something.

    Their brightness may differ, so that they vary together, and padding makes each vary at the
    borders of a layer. So the images themselves are looked at, each beside the spread of all.
    """
    own: list[Tensor] = []
    sums = []
    for batch in islice(reader, BATCHES):
        x = next(tensors_in(batch.inputs), None)
        if x is None or x.dim() < 4 or not x.is_floating_point() or x[0, :1].numel() < SAMPLES:
            return None
        values = x.detach().flatten(2).to(widest(x.device))
        own.append(values.var(2, correction=0))
        sums.append(torch.stack([values.mean(2), values.mean(2).square()]).mean(1) * len(values))
    var = torch.cat(own) if own else torch.zeros(0, 1)
    if len(var) < 2:
        return None
    mean, square = sum(sums[1:], sums[0]) / len(var)
    spread = var.mean(0) + (square - mean.square()).clamp(min=0)
    flat = int((var <= FLAT**2 * spread).all(1).sum())
    if flat <= MOST * len(var):
        return None
    return (
        f"{flat} of {len(var)} images have no contrast of their own: within each, values vary by "
        f"less than {FLAT:.0%} of the deviation of all (images that are blank, or constant?)"
    )


def alike_samples(one: InputStatistics) -> str | None:
    """Why the samples are no sample of anything, as constant or repeated images; else None.

    Those of a constant image vary in a layer all the same, at its borders: what counts is how far
    the mean and the mean square of a channel differ from sample to sample.
    """
    assert one.merged is not None
    count, var = one.errors.images, one.merged.var
    varies = var > 0
    if count < 2 or not bool(varies.any()):
        return None
    mean, square = (error * math.sqrt(count) for error in one.errors.of(one.merged))
    differ = torch.maximum(mean / var.sqrt(), square / var)[varies].median().item()
    if differ >= ALIKE:
        return None
    return (
        f"the {count} samples hardly differ from each other at {one.norm.path or 'the norm'}, by "
        f"{differ:.1g} of what it gets (images that are constant, or the same one again?)"
    )


def one_sided(
    before: EffectiveClasses | None, one: InputStatistics, layer: LayerChange
) -> str | None:
    """Why the data seem to be of one or few classes and otherwise as in training; else None."""
    assert one.merged is not None
    if before is None or before.samples < SAMPLES or not math.isfinite(before.effective):
        return None
    few = max(1.25, ONE_SIDED * before.classes)
    mean, var = (t.to(layer.before[0]) for t in (one.merged.mean, one.merged.var))
    scale = (layer.before[1].clamp(min=0) + layer.eps).sqrt()
    ratio = (var + layer.eps).sqrt() / scale
    error = (((mean - layer.before[0]) / scale).square() + (ratio - 1).square()).mean().sqrt()
    if before.effective >= few or not error.item() < FITS:
        return None
    return (
        f"the data look like those of training at {layer.path or 'the norm'}, but are of "
        f"{before.effective:.1f} classes in effect, of {before.classes}: adaptation would take "
        "away what tells these classes (mix the classes; guard=False if this is no classifier)"
    )


def lost_classes(before: EffectiveClasses | None, after: EffectiveClasses | None) -> str | None:
    """Why the predictions have collapsed; None if they have not."""
    if before is None or after is None:
        return None
    if not math.isfinite(after.effective):
        return "the outputs are not finite any more"
    if after.effective < VARIETY * before.effective:
        return (
            f"the predictions have collapsed: {before.effective:.1f} classes in effect before, "
            f"{after.effective:.1f} after"
        )
    return None


def _scores(output: Any) -> Tensor | None:
    """The scores (N, K) of a classifier, if the output is that."""
    first = next(tensors_in(output), None)
    if first is None or first.dim() != 2 or first.shape[1] < 2 or not first.is_floating_point():
        return None
    return first
