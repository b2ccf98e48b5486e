"""normkit::moments: the moments of cells, for layers whose coefficients are expressions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from normkit.core.layout import Batch, Channels
from normkit.engine import plain
from normkit.engine.operators_ready import on_triton
from normkit.engine.operators_records import TAGS

torch.library.define("normkit::moments", "(Tensor x, bool whole, int strips) -> Tensor", tags=TAGS)


def _forward(x: Tensor, whole: bool, strips: int) -> Tensor:
    """Mean and variance of each cell: (2, rows, columns)."""
    passes, _ = on_triton("normkit::moments", x)
    layout = Batch.of(x) if whole else Channels.of(x, strips)
    return torch.stack(passes.moments(x, layout))


def _forward_fake(x: Tensor, whole: bool, strips: int) -> Tensor:
    size = (2, 1, x.shape[1]) if whole else (2, x.shape[0], x.shape[1] * strips)
    return x.new_empty(size, dtype=torch.float32)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.whole, ctx.strips = inputs
    ctx.save_for_backward(x, output)


def _gradient(ctx: Any, grad: Tensor) -> Any:
    x, found = ctx.saved_tensors
    layout = Batch(x) if ctx.whole else Channels(x, ctx.strips)
    grad_mean, grad_var = grad / layout.count
    slope = 2 * grad_var
    return plain.moments_gradient(x, grad_mean - found[0] * slope, slope, layout), None, None


torch.library.impl("normkit::moments", ("cpu", "cuda"), _forward)
torch.library.register_fake("normkit::moments", _forward_fake)
torch.library.register_autograd("normkit::moments", _gradient, setup_context=_setup)
