"""Facts about data before a model sees them, and batches mixed anew."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from normkit.core.moments import Moments
from normkit.inspection.batches import LoaderBatch, ModelCall, tensors_in
from normkit.inspection.statistics import MomentsAccumulator, channel_moments

FEATURES = 512  # of a sample, that batches are compared by
BATCHES = 4  # least number that can be compared
SAMPLES = 32  # of a mixed batch, if the given ones are smaller
VALUES = 1 << 24  # and as long as it has no more values than this


@dataclass(frozen=True, eq=False)
class LoaderFacts:
    """Batches as they come: how large, how the inputs are distributed, how alike they are."""

    sizes: tuple[int, ...]
    inputs: Moments | None  # of each channel of the first input, (1, C); None if it has no numbers
    between: float = math.nan  # variance between batches, where 1 is what chance makes
    compared: int = 0  # batches that were
    batch_size: int | None = None  # as a DataLoader says
    last_size: int | None = None  # of the last batch, if it is known
    samples: int | None = None  # in all
    dataset: bool = False  # whether the loader has one, from which another can be made
    image_size: tuple[int, ...] | None = None  # height and width, if all images have one
    not_finite: tuple[int, ...] = ()  # batches, from 1, with inputs that are infinite or NaN
    source: str = ""  # in words: which loader, of which data


def data_of(batches: list[LoaderBatch], loader: Any, complete: bool) -> LoaderFacts:
    """From the batches that were read; ``complete`` if these are all."""
    pooling, means, spreads, sizes = MomentsAccumulator(), [], [], []
    image_sizes: set[tuple[int, ...]] = set()
    broken = []
    for number, batch in enumerate(batches, 1):
        if not all(_is_finite(t) for t in tensors_in(batch.inputs)):
            broken.append(number)
        sizes.append(batch.size)
        if batch.images is not None:  # of several sizes, perhaps: no batch
            table = _tables(batch.images)
            if table is None:
                continue
            if pooling.total is None or pooling.total.mean.shape[1] == len(batch.images[0]):
                for image in batch.images:
                    pooling.add(channel_moments(image[None]))
            if len(table) > 1 and len(table) == batches[0].size:
                means.append(table.mean(0))
                spreads.append(table.var(0))
            continue
        x = next(tensors_in(batch.inputs), None)
        if isinstance(batch.inputs, ModelCall) and batch.inputs.samples is not None:
            x = None
        if x is None or not x.is_floating_point() or x.dim() < 2 or x.numel() == 0:
            continue
        x = x if x.layout is torch.strided else x.to_dense()
        if x.dim() == 4:
            image_sizes.add(tuple(x.shape[2:]))
        if pooling.total is None or pooling.total.mean.shape[1] == x.shape[1]:
            pooling.add(channel_moments(x).pooled(samples=None))
        if len(x) > 1 and len(x) == batches[0].size:
            features = _features(x)
            means.append(features.mean(0))
            spreads.append(features.var(0))
    batch_size, last, samples = _announced(loader)
    if complete and last is None and sizes:
        last, samples = sizes[-1], sum(sizes)
    return LoaderFacts(
        tuple(sizes),
        pooling.total,
        _between(means, spreads, sizes[0] if sizes else 0),
        len(means),
        batch_size or (max(sizes) if sizes else None),
        last,
        samples,
        hasattr(loader, "dataset"),
        image_sizes.pop() if len(image_sizes) == 1 else None,
        tuple(broken),
        _source(loader, samples),
    )


def _source(loader: Any, samples: int | None) -> str:
    dataset = getattr(loader, "dataset", None)
    of = "" if dataset is None else f" of {type(dataset).__name__}"
    return f"{type(loader).__name__}{of}" + (f", {samples:,} samples" if samples else "")


def _features(x: Tensor) -> Tensor:
    """Some values of each sample, spread evenly, in float64."""
    flat = x.detach().flatten(1)
    step = -(-flat.shape[1] // FEATURES)
    return flat[:, ::step].double()


def _tables(images: Sequence[Tensor]) -> Tensor | None:
    """Mean and deviation of each channel, a row an image; None if the images have no numbers."""
    plain = all(x.is_floating_point() and x.numel() for x in images)
    if not plain or len({len(x) for x in images}) > 1:
        return None
    wide = [x.detach().flatten(1).double() for x in images]
    return torch.stack([torch.cat([x.mean(1), x.std(1, correction=0)]) for x in wide])


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


def _is_finite(x: Tensor) -> bool:
    if not x.is_floating_point():
        return True
    x = x.detach() if x.layout is torch.strided else x.detach().to_dense()
    return bool(torch.isfinite(x).all())


def mixed(batches: list[LoaderBatch]) -> list[LoaderBatch]:
    """The same samples, dealt out in turn to batches of their size or of at least 32 samples.

    Evaluation data often come sorted, and in small batches: statistics of such a batch are not
    those of the data. Data that cannot be taken apart by sample come back as they are.
    """
    if not all(_by_sample(b.as_given(), b.size) for b in batches) or not _alike(batches):
        return batches
    total = sum(batch.size for batch in batches)
    biggest = max(batch.size for batch in batches)
    values = sum(t[0].numel() for t in tensors_in(batches[0].inputs))
    size = max(biggest, min(SAMPLES, VALUES // max(values, 1)))
    count = max(1, total // size)
    if count == len(batches) == 1:
        return batches
    return [_every(batches, first, count) for first in range(count)]


def halved(inputs: Any, size: int) -> Any | None:
    """The first half of the samples of a batch; None if it cannot be cut."""
    cut = size > 1 and _by_sample(inputs, size)
    return _joined([inputs], [slice(size // 2)]) if cut else None


def _every(batches: list[LoaderBatch], first: int, count: int) -> LoaderBatch:
    """Every count-th sample of all batches, beginning with number ``first``."""
    before = accumulate((batch.size for batch in batches[:-1]), initial=0)
    chosen = [slice((first - seen) % count, None, count) for seen in before]
    parts = zip(*(batch.as_given() for batch in batches), strict=True)
    return LoaderBatch(*(_joined(list(each), chosen) for each in parts))


def _taken(x: Tensor, some: slice) -> Tensor:
    if x.layout is torch.strided:
        return x[some]
    return x.index_select(
        0, torch.arange(len(x), device=x.device)[some]
    )  # sparse ones have no views


def _joined(parts: list[Any], chosen: list[slice]) -> Any:
    """The chosen samples of each part, one behind the other."""
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat([_taken(part, some) for part, some in zip(parts, chosen, strict=True)])
    if isinstance(first, ModelCall):
        return replace(first, batch=_joined([part.batch for part in parts], chosen))
    if isinstance(first, Mapping):
        return {name: _joined([part[name] for part in parts], chosen) for name in first}
    return tuple(_joined(list(each), chosen) for each in zip(*parts, strict=True))


def _by_sample(value: Any, size: int) -> bool:
    """Whether it is nothing but tensors of so many samples."""
    if isinstance(value, Tensor):
        return value.dim() > 0 and value.shape[0] == size
    if isinstance(value, ModelCall):
        return value.samples is None and _by_sample(value.batch, size)
    if isinstance(value, Mapping):
        return all(_by_sample(each, size) for each in value.values())
    is_list = isinstance(value, tuple | list) and not hasattr(value, "_fields")
    return is_list and all(_by_sample(each, size) for each in value)


def _alike(batches: list[LoaderBatch]) -> bool:
    """Whether the tensors of all batches have the same form but for the number of samples."""
    forms = [[(t.shape[1:], t.dtype) for t in tensors_in(batch.as_given())] for batch in batches]
    return all(form == forms[0] for form in forms)
