"""How G balanced groups cut the D = C·L values of a sample, channel by channel."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor


class Cut(NamedTuple):
    """Pieces: the parts of channels that lie in one group."""

    piece: Tensor  # (C, L): the piece of each value
    size: Tensor  # (P,): values in each piece
    channel: Tensor  # (P,)
    group: Tensor  # (P,)


def cut(channels: int, positions: int, groups: int, device: torch.device) -> Cut:
    """Value d, in the order of channel then position, belongs to group ⌊d·G/D⌋."""
    # a compiler or tracer keeps the result itself, and under a dispatch mode tensors may be fake
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return _cut(channels, positions, groups, device)
    if torch.jit.is_tracing():
        return _cut(channels, int(positions), groups, device)
    return _remembered(channels, positions, groups, device)


def _cut(channels: int, positions: int, groups: int, device: torch.device) -> Cut:
    total = channels * positions
    edges = {-(-g * total // groups) for g in range(groups)}  # the first d of each group
    starts = sorted(edges | set(range(0, total, positions)))
    sizes = [b - a for a, b in zip(starts, [*starts[1:], total], strict=True)]
    # on the CPU, whatever the default device is
    count, first = (torch.tensor(values, device="cpu") for values in (sizes, starts))
    # a running count of first values: ONNX has no repeat_interleave that knows its length
    piece = torch.zeros(total, dtype=torch.int64, device="cpu").scatter(0, first, 1).cumsum(0) - 1
    parts = (piece.reshape(channels, positions), count, first // positions, first * groups // total)
    return Cut(*(part.to(device) for part in parts))


@lru_cache(maxsize=256)
def _remembered(channels: int, positions: int, groups: int, device: torch.device) -> Cut:
    with torch.inference_mode(False):  # it may serve training next, whoever asks first
        return _cut(channels, positions, groups, device)
