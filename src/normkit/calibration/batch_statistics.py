"""Statistics of the batch, for a while, without a trace in the running ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from normkit.errors import NothingToDo
from normkit.inspection import kind_of, select, survey


@contextmanager
def batch_statistics(model: nn.Module, where: Any = None) -> Iterator[None]:
    """Let batch norms use the statistics of each batch, and leave their running ones alone.

    For attacks, tests on whole batches (transductive), a teacher's or a second forward. Norms of
    normkit, torch.nn, timm and others are served alike: inside they compute as in training, while
    dropout and all else keep their mode. Afterwards buffers, counters and modes are what they were:
    the very tensors, so that a backward of an earlier forward still works. ``where`` chooses norms
    as in ``select``. Those that are frozen stay so, and those without running statistics use the
    batch anyway. With activation checkpointing, call backward inside.

    >>> import torch, normkit as nk
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8)).eval()
    >>> with nk.batch_statistics(model):
    ...     y = model(5 + torch.randn(4, 3, 9, 9))
    >>> bool(y.mean().abs() < 1e-3), int(model[1].num_batches_tracked)
    (True, 0)
    """
    norms = [
        part
        for site in select(survey(model), where)
        if site.of_batches and site.tracked and not site.frozen
        for part in site.norm.modules()
        if part is site.norm or kind_of(part) is not None  # not a drop layer inside
    ]
    if not norms:
        raise NothingToDo(
            "batch_statistics found no batch norm with running statistics that are not frozen."
        )
    mode, modes = model.training, [norm.training for norm in norms]
    kept = [dict(norm._buffers) for norm in norms]
    try:
        for norm, buffers in zip(norms, kept, strict=True):
            norm._buffers.update(
                {name: None if b is None else b.clone() for name, b in buffers.items()}
            )
            norm.training = True
        yield
    finally:
        for norm, buffers, was in zip(norms, kept, modes, strict=True):
            norm._buffers.update(buffers)
            if model.training == mode:  # else train() or eval() has told them otherwise
                norm.training = was
