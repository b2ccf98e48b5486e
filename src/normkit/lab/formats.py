"""What a run's numbers are: their type, the type of a forward, and the layout of images."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

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


def wide(values: Tensor) -> Tensor:
    """In float32 or wider, for losses."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


class ImageFormat:
    """The device, number type and memory format that a model wants its images in."""

    def __init__(self, device: torch.device, precision: str, channels_last: bool) -> None:
        self.device, self.dtype, self.precision = device, model_dtype(precision), precision
        self.memory = torch.channels_last if channels_last else torch.preserve_format

    def __call__(self, images: Tensor) -> Tensor:
        return images.to(self.device, self.dtype, non_blocking=True, memory_format=self.memory)

    def autocast(self) -> AbstractContextManager[object]:
        return autocast(self.precision, self.device)

    def nested(self, batch: Any) -> Any:
        """A batch of any structure on the device; fractions in the model's type, images laid out.

        Whole numbers, such as labels, keep their type.
        """
        if isinstance(batch, Tensor):
            if not batch.is_floating_point():
                return batch.to(self.device, non_blocking=True)
            return self(batch) if batch.dim() == 4 else batch.to(self.device, self.dtype)
        if isinstance(batch, Mapping):
            return {name: self.nested(part) for name, part in batch.items()}
        if isinstance(batch, tuple) and hasattr(batch, "_fields"):
            return type(batch)(*map(self.nested, batch))
        if isinstance(batch, tuple | list):
            return type(batch)(map(self.nested, batch))
        return batch
