"""A guard for adaptation without labels: has the model collapsed?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from normkit.calibration.feeding import Feed
from normkit.calibration.result import LayerChange
from normkit.inspection import undisturbed
from normkit.inspection.batches import tensors_in

FLAT = 0.1  # a standard deviation that has shrunk to this share counts as lost
MOST = 0.5  # of a layer's channels lost: then the layer is
VARIETY = 0.5  # of the effective number of predicted classes that has to stay
BATCHES = 8  # that are looked at


@dataclass(frozen=True)
class Variety:
    """How many classes a model predicts, in effect: the exponential of the entropy of the mean."""

    classes: float | None  # None if the output is not one row of scores a sample


def variety(feed: Feed) -> Variety:
    """From the outputs for the first few batches."""
    total: Tensor | None = None
    rows = 0
    with undisturbed(feed.model):
        for number, batch in enumerate(islice(feed, BATCHES), 1):
            scores = _scores(feed.run(batch, number))
            if scores is None:
                return Variety(None)
            summed = torch.softmax(scores.to(torch.float64), 1).sum(0)
            total = summed if total is None else total + summed
            rows += scores.shape[0]
    if total is None or rows < 2:
        return Variety(None)
    share = total / rows
    entropy = -(share * torch.log(share.clamp(min=1e-300))).sum().item()
    return Variety(math.exp(entropy))


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


def lost_variety(before: Variety, after: Variety) -> str | None:
    """Why the predictions have collapsed; None if they have not."""
    if before.classes is None or after.classes is None:
        return None
    if not math.isfinite(after.classes):
        return "the outputs are not finite any more"
    if after.classes < VARIETY * before.classes:
        return (
            f"the predictions have collapsed: {before.classes:.1f} classes in effect before, "
            f"{after.classes:.1f} after"
        )
    return None


def _scores(output: Any) -> Tensor | None:
    """The scores (N, K) of a classifier, if the output is that."""
    first = next(tensors_in(output), None)
    if first is None or first.dim() != 2 or first.shape[1] < 2 or not first.is_floating_point():
        return None
    return first
