"""Number types: of the model, inside autocast, and of the loss's scale."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def model_dtype(precision: str) -> torch.dtype:
    """Of parameters and images."""
    return torch.float64 if precision == "float64" else torch.float32


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """What a forward runs in."""
    if precision not in AUTOCAST:
        return nullcontext()
    # without the cache: a recorded step must cast its weights again every time
    return torch.autocast(device.type, AUTOCAST[precision], cache_enabled=False)


def scaler(precision: str, device: torch.device) -> torch.amp.GradScaler | None:
    """What keeps gradients in fp16 from vanishing; nothing else needs it."""
    if precision != "fp16":
        return None
    made = torch.amp.GradScaler(device.type)
    made.scale(torch.zeros((), device=device))  # makes its tensors: before a step is recorded
    return made
