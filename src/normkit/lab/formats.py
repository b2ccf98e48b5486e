"""What a run's numbers are: their type, the type of a forward, and the layout of images."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from normkit.inspection.batches import mapped

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
        return mapped(batch, self._moved)

    def _moved(self, x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return x.to(self.device, non_blocking=True)
        return self(x) if x.dim() == 4 else x.to(self.device, self.dtype)
