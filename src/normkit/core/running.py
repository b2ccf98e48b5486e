"""How running statistics are updated: one place, which cannot be poisoned or counted twice."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def is_recomputation() -> bool:
    """Whether this forward runs inside a backward: activation checkpointing computes it again.

    Its statistics have entered the buffers the first time.
    """
    if torch.compiler.is_compiling():
        return False
    return torch._C._current_graph_task_id() != -1


def all_finite(tables: Iterable[Tensor]) -> Tensor:
    """One boolean on the tables' device: no host synchronisation."""
    return torch.isfinite(torch.cat([table.detach().flatten() for table in tables])).all()


def blend(buffer: Tensor, new: Tensor, weight: float | Tensor, where: Tensor) -> None:
    """buffer ← (1 − weight)·buffer + weight·new, where the condition holds.

    ``weight`` is the weight of the new value, as in torch.nn.
    """
    new = new.detach().to(buffer.dtype).reshape(buffer.shape)
    buffer.copy_(torch.where(where, torch.lerp(buffer, new, weight), buffer))
