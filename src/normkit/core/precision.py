"""In which number type statistics are held."""

from __future__ import annotations

import torch


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32, or the given type where it is wider, so that gradcheck in float64 stays possible."""
    return torch.promote_types(dtype, torch.float32)
