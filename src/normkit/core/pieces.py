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
    if torch.compiler.is_compiling():  # which traces this once and keeps the result itself
        return _cut(channels, positions, groups, device)
    return _remembered(channels, positions, groups, device)


def _cut(channels: int, positions: int, groups: int, device: torch.device) -> Cut:
    total = channels * positions
    edges = {-(-g * total // groups) for g in range(groups)}  # the first d of each group
    starts = sorted(edges | set(range(0, total, positions)))
    count = torch.tensor([b - a for a, b in zip(starts, [*starts[1:], total], strict=True)])
    first = torch.tensor(starts)
    piece = torch.repeat_interleave(torch.arange(len(starts)), count)
    parts = (piece.reshape(channels, positions), count, first // positions, first * groups // total)
    return Cut(*(part.to(device) for part in parts))


_remembered = lru_cache(maxsize=256)(_cut)
