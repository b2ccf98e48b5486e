"""Measuring on a GPU without the blur of its fast modes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import nn

from normkit.core.precision import deterministic_cudnn


@contextmanager
def full_precision(*models: nn.Module) -> Iterator[None]:
    """float32 products in float32, not TF32, and one algorithm: for models on a CUDA device.

    With ten bits of mantissa a last digit that differs becomes a difference of 1e-3.
    """
    tensors = (t for m in models for t in chain(m.parameters(), m.buffers()))
    if not any(t.is_cuda for t in tensors):
        yield
        return
    cudnn: Any = torch.backends.cudnn
    products: list[Any] = [cudnn.conv, cudnn.rnn, torch.backends.cuda.matmul]
    precisions = [product.fp32_precision for product in products]
    try:
        for product in products:
            product.fp32_precision = "ieee"
        with deterministic_cudnn():
            yield
    finally:
        for product, precision in zip(products, precisions, strict=True):
            product.fp32_precision = precision
