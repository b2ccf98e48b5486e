"""What can be said about data before a model sees them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from normkit.core.moments import Moments
from normkit.diagnosis.batches import Batch
from normkit.inspection.batches import tensors_in
from normkit.inspection.calling import Call
from normkit.inspection.keepers import table_of
from normkit.inspection.tally import Pooling

FEATURES = 512  # of a sample, that batches are compared by
BATCHES = 4  # least number that can be compared


@dataclass(frozen=True, eq=False)
class Data:
    """Batches as they come: how large, how the inputs are distributed, how alike they are."""

    sizes: tuple[int, ...]
    inputs: Moments | None  # of each channel of the first input, (1, C); None if it has no numbers
    between: float = math.nan  # variance between batches, where 1 is what chance makes
    compared: int = 0  # batches that were
    batch_size: int | None = None  # as a DataLoader says
    last_size: int | None = None  # of the last batch, if it is known
    samples: int | None = None  # in all
    dataset: bool = False  # whether the loader has one, from which another can be made


def data_of(batches: list[Batch], loader: Any, complete: bool) -> Data:
    """From the batches that were read; ``complete`` if these are all."""
    pooling, means, spreads, sizes = Pooling(), [], [], []
    for batch in batches:
        sizes.append(batch.size)
        x = next(tensors_in(batch.inputs), None)
        if isinstance(batch.inputs, Call) and batch.inputs.samples is not None:
            x = None  # images of several sizes are no batch
        if x is None or not x.is_floating_point() or x.dim() < 2 or x.numel() == 0:
            continue
        if pooling.total is None or pooling.total.mean.shape[1] == x.shape[1]:
            pooling.add(table_of(x).pooled(samples=None))
        if len(x) > 1 and len(x) == batches[0].size:
            features = _features(x)
            means.append(features.mean(0))
            spreads.append(features.var(0))
    batch_size, last, samples = _announced(loader)
    if complete and last is None and sizes:
        last, samples = sizes[-1], sum(sizes)
    return Data(
        tuple(sizes),
        pooling.total,
        _between(means, spreads, sizes[0] if sizes else 0),
        len(means),
        batch_size or (max(sizes) if sizes else None),
        last,
        samples,
        hasattr(loader, "dataset"),
    )


def _features(x: Tensor) -> Tensor:
    """Some values of each sample, spread evenly, in float64."""
    flat = x.detach().flatten(1)
    step = -(-flat.shape[1] // FEATURES)
    return flat[:, ::step].double()


def _between(means: list[Tensor], spreads: list[Tensor], size: int) -> float:
    """Variance of the batches' means over that expected of random batches; mean over features.

    The F statistic of an analysis of variance; about 1 for batches drawn at random.
    """
    if len(means) < BATCHES or len({len(m) for m in means}) > 1:
        return math.nan
    between, within = torch.stack(means).var(0) * size, torch.stack(spreads).mean(0)
    varies = within > 0
    if not bool(varies.any()):
        return math.nan
    return float((between[varies] / within[varies]).mean())


def chance_of(compared: int) -> float:
    """Standard deviation of that number for random batches, if all features go together."""
    return math.sqrt(2 / max(compared - 1, 1))


def _announced(loader: Any) -> tuple[int | None, int | None, int | None]:
    """Batch size, size of the last batch, and samples of an epoch, as a DataLoader says."""
    size = getattr(loader, "batch_size", None)
    sampler = getattr(loader, "sampler", None)
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        return None, None, None
    try:
        total = len(sampler) if sampler is not None else len(loader.dataset)
    except (TypeError, AttributeError, NotImplementedError):  # streams have no length
        return size, None, None
    left = total % size
    last = size if left == 0 or getattr(loader, "drop_last", False) else left
    return size, last if total >= size or left else None, total
