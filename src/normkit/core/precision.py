"""In which number type statistics are held."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32, or the given type where it is wider, so that gradcheck in float64 stays possible."""
    return torch.promote_types(dtype, torch.float32)


def widest(device: torch.device) -> torch.dtype:
    """float64, or float32 on devices that have nothing wider."""
    return torch.float32 if device.type == "mps" else torch.float64


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Matrix products in the type of their operands, where autocast would narrow them."""
    if torch.amp.is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()
