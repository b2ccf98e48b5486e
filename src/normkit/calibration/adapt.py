"""adapt: statistics for data that differ from what a model was trained on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import nn

from normkit.calibration.calibrate import sweep_of
from normkit.calibration.changing import change_statistics
from normkit.calibration.feeding import Feed, Forward
from normkit.calibration.guard import lost_layer, lost_variety, variety
from normkit.calibration.result import Calibration, LayerChange
from normkit.calibration.subjects import subjects_of
from normkit.calibration.verdict import Metric
from normkit.errors import OptionError


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
    subjects = subjects_of(model, where, frozen)
    feed = Feed(model, batches, forward, images)
    sweep = sweep_of(mode, together)
    feed.kept()
    before = variety(feed) if guard else None

    def check(layers: Sequence[LayerChange]) -> str | None:
        if before is None:
            return None
        return lost_layer(layers) or lost_variety(before, variety(feed))

    return change_statistics(
        model,
        feed,
        subjects,
        sweep=sweep,
        mode=mode,
        prior=prior,
        metric=metric,
        higher_is_better=higher_is_better,
        note=note,
        what="adapted",
        check=check,
    )
