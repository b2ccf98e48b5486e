"""Statistics of the batch, for a while, without a trace in the running ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from normkit.errors import NothingToDo
from normkit.inspection import kind_of, select, survey
from normkit.layers.synchronised import sharing_nothing


@contextmanager
def batch_statistics(model: nn.Module, where: Any = None) -> Iterator[None]:
    """Let batch norms use the statistics of each batch, and leave their running ones alone.

    For attacks, tests on whole batches (transductive), a teacher's or a second forward. Norms of
    normkit, torch.nn, timm and others are served alike: inside they compute as in training, while
    dropout and all else keep their mode. Afterwards buffers, counters and modes are what they were:
    the very tensors, so that a backward of an earlier forward still works. ``where`` chooses norms
    as in ``select``. Those that are frozen stay so, and those without running statistics use the
    batch anyway. Blocks may be nested or overlap. With activation checkpointing, call backward
    inside. After ``nk.sync`` it is the batch of this process alone: one of them may do it, and the
    others need not.

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
    mode = model.training
    try:
        for norm in norms:
            _enter(norm)
        with sharing_nothing(model.modules()):
            yield
    finally:
        for norm in norms:
            # else train() or eval() has told them otherwise
            _leave(norm, mode_too=model.training == mode)


@dataclass
class _Kept:
    """What a norm had before the first of the blocks that it is in."""

    buffers: dict[str, Tensor | None]
    training: bool
    blocks: int = 0


# blocks may be nested, and overlap where an ExitStack or a generator ends them: the last one out
# gives back what the first one found
_kept: WeakKeyDictionary[nn.Module, _Kept] = WeakKeyDictionary()


def _enter(norm: nn.Module) -> None:
    if norm not in _kept:
        buffers = dict(norm._buffers)
        copies = {name: None if b is None else b.clone() for name, b in buffers.items()}
        _kept[norm] = _Kept(buffers, norm.training)
        norm._buffers.update(copies)
    _kept[norm].blocks += 1
    norm.training = True


def _leave(norm: nn.Module, mode_too: bool) -> None:
    kept = _kept.get(norm)
    if kept is None:  # an error came before it entered
        return
    kept.blocks -= 1
    if kept.blocks:
        return
    del _kept[norm]
    norm._buffers.update(kept.buffers)
    if mode_too:
        norm.training = kept.training
