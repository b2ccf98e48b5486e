"""Activations that wait for the backward in the host's memory."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

SMALL = 1 << 14  # values; less is not worth a trip


def offloaded(wanted: bool) -> AbstractContextManager[Any]:
    """What autograd keeps inside of the block is moved to the host; parameters stay."""
    if not wanted:
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(_to_host, _back)


def _to_host(tensor: Tensor) -> Any:
    if tensor.device.type == "cpu" or tensor.numel() < SMALL or isinstance(tensor, nn.Parameter):
        return tensor
    host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
    host.copy_(tensor, non_blocking=True)
    return tensor.device, host


def _back(kept: Any) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    device, host = kept
    return host.to(device, non_blocking=True)
