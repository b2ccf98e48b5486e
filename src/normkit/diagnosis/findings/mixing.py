"""Batches put together anew, so that each looks like all of the data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from normkit.diagnosis.batches import NO_TARGET, Batch
from normkit.inspection.batches import tensors_in
from normkit.inspection.calling import Call

SAMPLES = 32  # of a mixed batch, if the given ones are smaller
VALUES = 1 << 24  # and as long as it has no more values than this


def mixed(batches: list[Batch]) -> list[Batch]:
    """The same samples, dealt out in turn to batches of their size or of at least 32 samples.

    Evaluation data often come sorted, and in small batches: statistics of such a batch are not
    those of the data. Data that cannot be taken apart by sample come back as they are.
    """
    if not batches or not all(map(_by_sample, batches)) or not _alike(batches):
        return batches
    total = sum(batch.size for batch in batches)
    biggest = max(batch.size for batch in batches)
    values = sum(t[0].numel() for t in tensors_in(batches[0].inputs))
    size = max(biggest, min(SAMPLES, VALUES // max(values, 1)))
    count = max(1, total // size)
    if count == len(batches) == 1:
        return batches
    return [_every(batches, first, count) for first in range(count)]


def _every(batches: list[Batch], first: int, count: int) -> Batch:
    """Every count-th sample of all batches, beginning with number ``first``."""
    starts, seen = [], 0
    for batch in batches:
        starts.append((first - seen) % count)
        seen += batch.size
    inputs = _joined([batch.inputs for batch in batches], starts, count)
    if batches[0].target is NO_TARGET:
        return Batch(inputs, NO_TARGET)
    return Batch(inputs, _joined([batch.target for batch in batches], starts, count))


def _joined(parts: list[Any], starts: list[int], step: int) -> Any:
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat([part[s::step] for part, s in zip(parts, starts, strict=True)])
    if isinstance(first, Call):
        return replace(first, batch=_joined([part.batch for part in parts], starts, step))
    if isinstance(first, Mapping):
        return {name: _joined([part[name] for part in parts], starts, step) for name in first}
    if isinstance(first, tuple | list):
        return tuple(_joined(list(each), starts, step) for each in zip(*parts, strict=True))
    return first


def _by_sample(batch: Batch) -> bool:
    """Whether inputs and target are nothing but tensors, as long as the batch."""
    given = (batch.inputs,) if batch.target is NO_TARGET else (batch.inputs, batch.target)
    return all(_cut(each, batch.size) for each in given)


def _cut(value: Any, size: int) -> bool:
    if isinstance(value, Tensor):
        return value.dim() > 0 and value.shape[0] == size
    if isinstance(value, Call):
        return value.samples is None and _cut(value.batch, size)
    if isinstance(value, Mapping):
        return all(_cut(each, size) for each in value.values())
    is_list = isinstance(value, tuple | list) and not hasattr(value, "_fields")
    return is_list and all(_cut(each, size) for each in value)


def _alike(batches: list[Batch]) -> bool:
    """Whether the tensors of all batches have the same form but for the number of samples."""
    forms = [[(t.shape[1:], t.dtype) for t in _tensors(batch)] for batch in batches]
    return all(form == forms[0] for form in forms)


def _tensors(batch: Batch) -> Iterable[Tensor]:
    yield from tensors_in(batch.inputs)
    if batch.target is not NO_TARGET:
        yield from tensors_in(batch.target)


def halved(inputs: Any, size: int) -> Any | None:
    """The first half of the samples of a batch; None if it cannot be cut."""
    if size < 2 or not _cut(inputs, size):
        return None
    return _joined([_upto(inputs, size // 2)], [0], 1)


def _upto(value: Any, count: int) -> Any:
    if isinstance(value, Tensor):
        return value[:count]
    if isinstance(value, Call):
        return replace(value, batch=_upto(value.batch, count))
    if isinstance(value, Mapping):
        return {name: _upto(each, count) for name, each in value.items()}
    return tuple(_upto(each, count) for each in value)
