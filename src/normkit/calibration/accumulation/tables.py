"""Tables of moments of several micro-batches, joined and cut apart again."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from normkit.core.moments import Moments
from normkit.errors import OptionError


def joined(parts: Sequence[Moments]) -> Moments:
    """The table of all micro-batches, one after the other."""
    first = parts[0]
    for part in parts:
        same = part.mean.shape[1:] == first.mean.shape[1:]
        if not (same and _same_count(part.count, first.count)):
            raise OptionError(
                "The micro-batches have feature maps of different sizes: no full batch could hold "
                "them. Give micro-batches of one size."
            )
    mean, var = torch.cat([p.mean for p in parts]), torch.cat([p.var for p in parts])
    return Moments(mean, var, first.count)


def bounds_of(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Where each part begins and ends when they stand one after the other."""
    ends = list(accumulate(sizes))
    return list(zip([0, *ends], ends, strict=False))


def rows(found: Any, start: int, stop: int, total: int) -> Any:
    """The rows of one micro-batch, of tables that have a row a sample; others are for all."""
    if isinstance(found, Tensor):
        return found[start:stop] if found.dim() > 1 and found.shape[0] == total > 1 else found
    if isinstance(found, tuple):
        cut = [rows(part, start, stop, total) for part in found]
        return type(found)(*cut) if hasattr(found, "_fields") else tuple(cut)
    return found


def _same_count(a: int | Tensor, b: int | Tensor) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return torch.equal(torch.as_tensor(a), torch.as_tensor(b))
    return a == b
