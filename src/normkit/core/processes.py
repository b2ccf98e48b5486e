"""Moments that several processes share: one all-reduce forward, one backward, none on the host.

Each process pools its own samples and sends (n, n·mean, n·(var + mean²)) of each channel, in
float64, so that differences of large numbers cost nothing that float32 would have shown. The sum is
that of the joined batch, whatever each process has of it: unequal batches and empty ones are exact.
Backward needs the gradients of mean and variance of all processes, and then each has its own share:

    d mean_own = n/N · (d mean + 2·(mean_own − mean)·d var),    d var_own = n/N · d var

The all-reduces are functional collectives, by the name of a process group: a compiled graph can
hold them, gloo and NCCL serve them, and nothing waits for a number.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from normkit.core.moments import Moments


class Processes:
    """The processes that share statistics: the name of their group, and how many they are.

    A name and not a handle, for graphs and copies to hold. In a file it has none: groups end with
    the processes that made them.
    """

    __slots__ = ("name", "rank", "size")

    def __init__(self, name: str, size: int, rank: int) -> None:
        self.name, self.size, self.rank = name, size, rank

    @classmethod
    def of(cls, group: Any) -> Processes:
        """Those of a process group of torch.distributed, of which this process is a member."""
        return cls(group.group_name, group.size(), group.rank())

    def __reduce__(self) -> Any:
        return Processes, ("", self.size, 0)

    def __deepcopy__(self, memo: Any) -> Processes:
        return self

    def __copy__(self) -> Processes:
        return self

    def __repr__(self) -> str:
        return f"Processes({self.size}, group {self.name!r})"


def total(table: Tensor, processes: Processes) -> Tensor:
    """The sum of a table over the processes, with its gradient."""
    summed: Tensor = _Total.apply(table, processes.name)
    return summed


def merged(own: Moments, processes: Processes) -> Moments:
    """The moments, tables (1, K), of the values of all processes.

    ``own`` are those of the values here; without any, of whatever value and with a count of 0.
    """
    mean, var = own.mean, own.var
    count = own.count
    if not isinstance(count, Tensor):
        count = mean.new_full((1, 1), count, dtype=torch.float64)
    mean, var, values = _Merged.apply(mean, var, count, processes.name)
    return Moments(mean, var, values)


def _all_reduce(table: Tensor, name: str) -> Tensor:
    ops = torch.ops._c10d_functional
    summed: Tensor = ops.wait_tensor(ops.all_reduce(table, "sum", name))
    return summed


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, name: str) -> Any:
        ctx.name = name
        return _all_reduce(table.contiguous(), name)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _Total.apply(grads[0], ctx.name), None


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mean: Tensor, var: Tensor, count: Tensor, name: str) -> Any:
        n, m = count.to(torch.float64).reshape(1, -1), mean.to(torch.float64)
        parts = n, n * m, n * (m.square() + var)
        sizes = [part.shape[1] for part in parts]
        all_n, first, second = _all_reduce(torch.cat(parts, 1), name).split(sizes, 1)
        some = all_n.clamp(min=1)
        all_mean = first / some
        all_var = (second / some - all_mean.square()).clamp(min=0)
        share = (n / some).to(mean.dtype)
        all_mean, all_var, all_n = (t.to(mean.dtype) for t in (all_mean, all_var, all_n))
        ctx.save_for_backward(mean, all_mean, share)
        ctx.mark_non_differentiable(all_n)
        ctx.name = name
        return all_mean, all_var, all_n

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        mean, all_mean, share = ctx.saved_tensors
        summed = _Total.apply(torch.cat(grads[:2], 1), ctx.name)
        d_mean, d_var = summed.chunk(2, 1)
        d_own = share * (d_mean + 2 * (mean - all_mean) * d_var)
        return d_own, share * d_var, None, None
