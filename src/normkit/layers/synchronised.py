"""Layers whose statistics are those of several processes: what ``nk.sync`` switches on.

A layer pools its own samples and shares what comes of that: ``shared``. Runs of samples
(``virtual_batch``) stay within a process, and only what the layer keeps of them is averaged over
all: ``over_runs``. Who shares is part of the state that a forward starts from, so that the same
function, called to look at a layer, shares nothing and waits for nobody.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, distributed, nn

from normkit.core.layout import Layout
from normkit.core.messages import title
from normkit.core.moments import Moments
from normkit.core.precision import statistics_dtype
from normkit.core.processes import Processes, merged, total
from normkit.core.statistics import LayerState
from normkit.errors import OptionError, RankError

AGAIN = "Try nk.sync(model) once the process group is there, or nk.sync(model, False)."


# torch's own conversion goes through all modules by named_children, and knows only torch's layers
CONVERSION: Any = nn.SyncBatchNorm.convert_sync_batchnorm.__func__.__code__  # type: ignore[attr-defined]


class _Lookers:
    """The threads that look at a layer, once for each block. A copy or a file has none."""

    def __init__(self, threads: tuple[int, ...]) -> None:
        self.threads = threads

    def here(self) -> bool:
        # a graph does not know its thread; it is traced anew when a look begins and ends
        return torch.compiler.is_compiling() or threading.get_ident() in self.threads

    def __reduce__(self) -> Any:
        return type(None), ()


class Synchronised:
    """What a normalizer knows of other processes that train the same model."""

    processes: Processes | None = None
    _lookers: _Lookers | None = None
    virtual_batch: int | None
    training: bool

    def can_synchronise(self) -> bool:
        """Whether it keeps or uses statistics of a batch, with the options that it has."""
        return True

    def synchronise(self, processes: Processes | None) -> None:
        """Share the statistics of training batches with these processes; with None, no more."""
        self.processes = processes

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        caller = sys._getframe(1)
        if caller.f_code is CONVERSION and self.can_synchronise():
            self._converted_by_torch(caller.f_locals.get("process_group"))
        children: Iterator[tuple[str, nn.Module]] = super().named_children()  # type: ignore[misc]
        return children

    def _converted_by_torch(self, group: Any) -> None:
        """nn.SyncBatchNorm.convert_sync_batchnorm goes by: it would leave the layer as it is."""
        if distributed.is_available() and distributed.is_initialized():
            if group is distributed.GroupMember.NON_GROUP_MEMBER:
                raise OptionError(
                    "convert_sync_batchnorm got a process group that this process is no member of."
                )
            self.synchronise(Processes.of(distributed.group.WORLD if group is None else group))
            return
        warnings.warn(
            f"convert_sync_batchnorm leaves {type(self).__name__} as it is, without a process "
            "group. Try nk.sync(model) after torch.distributed.init_process_group().",
            stacklevel=4,
        )

    def shares_domains(self) -> bool:
        return self.processes is not None and self.processes.size > 1

    def sharing(self) -> Processes | None:
        """With whom a forward shares its statistics now: in training, and if there are others."""
        processes = self.processes
        if processes is None or processes.size == 1 or not self.training:
            return None
        if self._lookers is not None and self._lookers.here():
            return None
        if not torch.compiler.is_compiling():
            assert isinstance(self, nn.Module)
            if not processes.name or not distributed.is_initialized():
                raise OptionError(
                    f"{title(self)} shares its statistics with {processes.size} processes, but "
                    f"here is no process group of them. {AGAIN}"
                )
            if getattr(self, "_is_replica", False):
                raise OptionError(
                    f"{title(self)} shares its statistics with other processes, but is a replica "
                    "of nn.DataParallel, whose threads would meet in any order. Try "
                    "DistributedDataParallel, or nk.sync(model, False)."
                )
        return processes

    def shared(self, pooled: Moments, state: LayerState) -> Moments:
        """Moments (1, K) of the samples here, merged with those of the other processes."""
        if state.processes is None:
            return pooled
        if torch.compiler.is_compiling():
            return merged(pooled, state.processes)
        try:
            return merged(pooled, state.processes)
        except RuntimeError as error:  # of a collective, which knows ports and no layers
            assert isinstance(self, nn.Module)
            raise RankError(
                f"{title(self)} could not share its statistics with {state.processes.size} "
                f"processes: {error} Try nk.check_distributed(model, step=...), which says which "
                "of them went another way."
            ) from error

    def over_runs(
        self, pooled: Moments, state: LayerState, *tables: Tensor, least: int = 2
    ) -> list[Any]:
        """Averages (C,) of tables (R, C) over the runs, each weighted by how many values it has;
        then, for ``blended``, whether these are at least so many, if only the device knows that.

        Of the runs of all processes; where the whole batch is one, it has been shared already.
        """
        if state.processes is None or self.virtual_batch is None:
            return [*(_over_runs(table, pooled) for table in tables), pooled.enough(least)]
        weight = torch.as_tensor(pooled.count, device=tables[0].device).to(tables[0].dtype)
        weight = weight.expand(tables[0].shape[0], weight.shape[-1] if weight.dim() else 1)
        sums = [weight.sum(0), *((table * weight).sum(0) for table in tables)]
        count, *rest = total(torch.cat(sums), state.processes).split([len(s) for s in sums])
        some = count.clamp(min=1)
        return [*(part / some for part in rest), (count >= least).all()]


_lock = threading.Lock()


@contextmanager
def sharing_nothing(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, forwards of this thread share no statistics: who looks at a model waits for nobody.

    Blocks may be nested or overlap, also those of several threads.
    """
    layers = [m for m in modules if isinstance(m, Synchronised) and m.processes is not None]
    thread = threading.get_ident()
    for layer in layers:
        with _lock:
            held = layer._lookers
            layer._lookers = _Lookers((*(held.threads if held else ()), thread))
    try:
        yield
    finally:
        for layer in layers:
            with _lock:
                threads = list(layer._lookers.threads if layer._lookers else ())
                if thread in threads:
                    threads.remove(thread)
                if threads:
                    layer._lookers = _Lookers(tuple(threads))
                else:
                    vars(layer).pop("_lookers", None)


def _over_runs(table: Tensor, pooled: Moments) -> Tensor:
    if table.shape[0] == 1:
        return table[0]
    if isinstance(pooled.count, Tensor):
        weight = pooled.count.to(table.dtype)
        return (table * weight).sum(0) / weight.sum(0).clamp(min=1)
    return table.mean(0)


def empty_moments(x: Tensor, cells: Layout) -> Moments:
    """The table of an input without samples, (0, K), from which gradients find back to it."""
    table = x.new_zeros((0, cells.columns), dtype=statistics_dtype(x.dtype)) + x.sum()
    return Moments(table, table, cells.count)
