"""How far two outputs are apart."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def difference(before: Sequence[Tensor], after: Sequence[Tensor]) -> float:
    """max |after − before| / max |before| of the tensor where it is largest.

    Infinite if the shapes differ, as of a detector that finds another number of boxes, or if
    numbers are finite on one side only.
    """
    if [t.shape for t in before] != [t.shape for t in after]:
        return math.inf
    return max((_difference(a, b) for a, b in zip(before, after, strict=True)), default=0.0)


def _difference(before: Tensor, after: Tensor) -> float:
    wide = torch.promote_types(before.dtype, torch.float32)
    a, b = before.detach().to(wide), after.detach().to(wide)
    alike = (a == b) | (a.isnan() & b.isnan())
    gap = torch.where(alike, 0, (b - a).abs()).nan_to_num(nan=math.inf, posinf=math.inf).amax()
    scale = torch.where(a.isfinite(), a, 0).abs().amax()
    return float(gap / torch.where(scale > 0, scale, 1))


def leaves(output: Any) -> list[Tensor]:
    """The tensors with real numbers in whatever a model returns."""
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() and output.numel() else []
    if isinstance(output, Mapping):
        return [t for value in output.values() for t in leaves(value)]
    if isinstance(output, tuple | list):
        return [t for value in output for t in leaves(value)]
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        return [t for f in dataclasses.fields(output) for t in leaves(getattr(output, f.name))]
    return []
