"""What the buffers of norms held, to be put back bit for bit."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


class Snapshot:
    """Copies of all buffers of some modules."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.kept: list[tuple[Tensor, Tensor]] = [
            (buffer, buffer.detach().clone())
            for module in modules
            for buffer in module._buffers.values()
            if buffer is not None
        ]

    def restore(self) -> None:
        """Put the values back into the same memory."""
        with torch.no_grad():
            for buffer, value in self.kept:
                buffer.copy_(value)
