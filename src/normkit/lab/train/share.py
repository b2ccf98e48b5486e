"""One of several processes that train a run together: its share of every batch.

Every process has the whole model, the same plan of batches, and works on its share of each batch.
Gradients are added up before the optimizer's step, so that all take the same one. A share's loss is
weighted by how many of the batch's samples it has: together they are the loss of the batch.

Statistics are those of a share alone ("process"), and running statistics become the average over
the shares, which is what ``worker_batch`` simulates in one process; or they are those of the whole
batch ("synchronized"): the moments of all samples travel, and norms compute their tables from all
of them, as they do for micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from normkit import survey
from normkit.calibration.accumulation.sharing import (
    FirstSamples,
    SharedNorm,
    can_share,
    exchanging_through,
    rows,
)
from normkit.core.moments import Moments
from normkit.core.statistics import LayerState, MapResult
from normkit.errors import OptionError
from normkit.lab.experiment import Train
from normkit.lab.train.batches import EpochPlan

Bounds = tuple[int, int]  # first sample of a share, and the one after its last


class BatchShare:
    """The share of one process. ``rank`` counts from 0."""

    def __init__(self, train: Train, rank: int) -> None:
        self.rank, self.count = rank, train.gpus
        self.most = train.batch // train.gpus  # samples
        self.synchronized = train.statistics == "synchronized"
        self.bounds: Bounds = (0, 0)  # in the batch at hand
        self.size = 0  # of the batch at hand

    # ---------------------------------------------------------------- which samples

    def bounds_in(self, size: int, rank: int | None = None) -> Bounds:
        """Of a process in a batch of so many samples.

        An incomplete batch fills one share after the other, as ``worker_batch`` would; the last
        ones may then be empty. With synchronized statistics it is spread evenly.
        """
        rank = self.rank if rank is None else rank
        if self.synchronized:
            return size * rank // self.count, size * (rank + 1) // self.count
        return min(size, rank * self.most), min(size, (rank + 1) * self.most)

    def cut(self, first: int, last: int) -> Bounds:
        """The part of a batch that a loader has to read: never nothing."""
        begin, end = self.bounds_in(last - first)
        return (first + begin, first + end) if begin < end else (first, first + 1)

    def take(self, given: tuple[Any, ...], size: int) -> tuple[Any, ...]:
        """This process's part of what a step is given for a batch of so many samples."""
        self.bounds, self.size = self.bounds_in(size), size
        taken: tuple[Any, ...] = self._taken(given)
        return taken

    def _taken(self, value: Any) -> Any:
        begin, end = self.bounds
        if isinstance(value, Tensor):
            length = value.shape[0] if value.dim() else 0
            if length == self.size:
                return value[begin:end]
            if length == end - begin or begin == end:  # a loader that reads shares only
                return value[: end - begin]
            raise OptionError(
                f"train.gpus = {self.count} expects tensors that begin with the {self.size} "
                f"samples of a batch, got {tuple(value.shape)}. Try train.gpus = 1."
            )
        if isinstance(value, list) and len(value) == self.size:
            return value[begin:end]
        if isinstance(value, tuple | list):
            return type(value)(self._taken(each) for each in value)
        if isinstance(value, Mapping):
            return {name: self._taken(each) for name, each in value.items()}
        return value

    @property
    def empty(self) -> bool:
        """Whether there is nothing to do in the batch at hand but to agree with the others."""
        return self.bounds[0] == self.bounds[1]

    @property
    def weight(self) -> float:
        """What the share's mean loss counts for."""
        return (self.bounds[1] - self.bounds[0]) / self.size

    # ---------------------------------------------------------------- agreeing

    def add_up_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """One message for all; a parameter that a share has not used counts as 0."""
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        grads = [p.grad for p in parameters if p.grad is not None]
        for kind in dict.fromkeys(grad.dtype for grad in grads):
            self._together([grad for grad in grads if grad.dtype == kind])

    @torch.no_grad()
    def average_statistics(self, model: nn.Module) -> None:
        """Buffers become the average over the shares, and counters the largest of them."""
        if self.synchronized:
            return
        buffers = list(model.buffers())
        wide = [b for b in buffers if b.is_floating_point()]
        for kind in dict.fromkeys(b.dtype for b in wide):
            of_kind = [b for b in wide if b.dtype == kind]
            for buffer in of_kind:
                buffer.mul_(self.weight)
            self._together(of_kind)
        counters = [b for b in buffers if not b.is_floating_point()]
        if counters:
            flat = torch.cat([b.long().flatten() for b in counters])
            dist.all_reduce(flat, dist.ReduceOp.MAX)
            _write(flat, counters)

    def _together(self, tensors: Sequence[Tensor]) -> None:
        flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
        dist.all_reduce(flat)
        _write(flat, tensors)

    @contextmanager
    def sharing_statistics(self, model: nn.Module) -> Iterator[None]:
        """Inside, norms use the statistics of the whole batch, if those are asked for."""
        with ExitStack() as stack:
            if self.synchronized:
                for site in survey(model):
                    if can_share(site):
                        stack.enter_context(SharedNorm(site).sharing())
                    elif getattr(site.norm, "running_mean", None) is not None:
                        raise OptionError(
                            f"{site.path} ({site.kind}) cannot share its statistics between "
                            'processes. Try train.statistics = "process".'
                        )
            yield

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around the forward of a share."""
        if not self.synchronized:
            yield
            return
        with exchanging_through(self):
            yield

    def exchange(self, norm: SharedNorm, x: Tensor, own: Moments, state: LayerState) -> MapResult:
        """The share's rows of what a norm computes from the moments of the whole batch."""
        layer = norm.layer
        mean, var = (self.gathered(table) for table in (own.mean, own.var))
        whole = Moments(mean, var, own.count)
        few = layer.observed_samples()
        first = self.gathered(x.detach())[:few] if few else x.detach()[:0]
        seen = layer.observe(FirstSamples(first, self.size), whole, state)
        result: MapResult = rows(layer.compute(whole, seen), *self.bounds, self.size)
        return result

    def gathered(self, table: Tensor) -> Tensor:
        """The rows of all processes, one after the other."""
        whole: Tensor = GatheredRows.apply(table, *self.bounds, self.size)
        return whole

    # ---------------------------------------------------------------- numbers of an epoch

    def collected(self, rows: Tensor, plan: EpochPlan) -> tuple[Tensor, list[int]]:
        """The rows of all shares that are not empty, batch by batch, and their sizes."""
        parts = [torch.empty_like(rows) for _ in range(self.count)]
        dist.all_gather(parts, rows.contiguous())
        every = torch.stack(parts, 1)  # (batches, processes, numbers)
        kept, sizes = [], []
        for batch in range(rows.shape[0]):
            for rank in range(self.count):
                begin, end = self.bounds_in(plan.size(batch), rank)
                if begin < end:
                    kept.append(every[batch, rank])
                    sizes.append(end - begin)
        return torch.stack(kept), sizes

    def combined_losses(self, losses: Tensor, plan: EpochPlan) -> list[float]:
        """Of each batch so far."""
        weights = [self.bounds_in(plan.size(batch)) for batch in range(len(losses))]
        share = losses.new_tensor([end - begin for begin, end in weights])
        sizes = losses.new_tensor([plan.size(batch) for batch in range(len(losses))])
        whole = torch.where(share > 0, losses, 0) * share / sizes
        dist.all_reduce(whole)
        combined: list[float] = whole.tolist()
        return combined


class GatheredRows(torch.autograd.Function):
    """The rows of all processes; what flows back into a row is what all of them send into it."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, begin: int, end: int, size: int) -> Tensor:
        ctx.bounds = begin, end
        whole = own.new_zeros(size, *own.shape[1:])
        whole[begin:end] = own
        dist.all_reduce(whole)  # zeros are added to each row: no digit changes
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        whole = grads[0].contiguous().clone()
        dist.all_reduce(whole)
        begin, end = ctx.bounds
        return whole[begin:end], None, None, None


def _write(flat: Tensor, tensors: Iterable[Tensor]) -> None:
    at = 0
    for tensor in tensors:
        tensor.copy_(flat[at : at + tensor.numel()].view_as(tensor))
        at += tensor.numel()
