"""In which number type statistics are held, and settings of torch that change last digits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32, or the given type where it is wider, so that gradcheck in float64 stays possible."""
    return torch.promote_types(dtype, torch.float32)


def widest(device: torch.device) -> torch.dtype:
    """float64, or float32 on devices that have nothing wider."""
    return torch.float32 if device.type == "mps" else torch.float64


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Matrix products in the type of their operands, where autocast would narrow them."""
    # a compiler knows the usual devices without asking: not every version can trace the question
    if device.type in ("cpu", "cuda") or torch.amp.is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


@contextmanager
def deterministic_cudnn(wanted: bool = True) -> Iterator[None]:
    """cuDNN computes the same numbers every time; if that is not wanted, it takes what is fastest.

    By the setters behind ``torch.backends.cudnn``: those refuse to be set in programs that have
    called disable_global_flags, as test suites of torch do.
    """
    cudnn: Any = torch.backends.cudnn
    setters: Any = torch._C
    before = cudnn.benchmark, cudnn.deterministic
    setters._set_cudnn_benchmark(not wanted)
    setters._set_cudnn_deterministic(wanted)
    try:
        yield
    finally:
        setters._set_cudnn_benchmark(before[0])
        setters._set_cudnn_deterministic(before[1])
