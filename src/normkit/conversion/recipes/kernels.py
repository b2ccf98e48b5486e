"""How the depthwise kernels of bnet and ubn start."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from normkit.conversion.edits import SetTensor
from normkit.conversion.recipes.assembly import norm_path
from normkit.errors import OptionError, nearest
from normkit.layers.bnet import KERNEL_STARTS, start_kernel
from normkit.layers.norm_act import NormAct

STARTS = ("exact", *KERNEL_STARTS)


def check_start(recipe: str, start: str) -> None:
    if start not in STARTS:
        raise OptionError(f"{recipe} got start={start!r}. {nearest(str(start), STARTS)}")


def started(new: dict[str, nn.Module], start: str) -> Iterator[SetTensor]:
    """Edits that fill the kernels of new layers; none for an exact start, which they have."""
    if start == "exact":
        return
    for path, module in new.items():
        norm: Any = module.norm if isinstance(module, NormAct) else module
        if norm.weight is None or norm.weight.dim() < 3:
            continue
        kernel, bias = torch.empty_like(norm.weight), torch.empty_like(norm.bias)
        start_kernel(kernel, bias, start, norm.scale_init)
        at = norm_path(path, module)
        yield SetTensor(f"{at}.weight", kernel.detach(), f"{at}: its kernel starts as {start!r}")
        yield SetTensor(f"{at}.bias", bias.detach(), f"{at}: its bias starts as {start!r}")
