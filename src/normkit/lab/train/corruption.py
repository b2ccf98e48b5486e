"""Test images that are damaged in ways that training has not seen.

In the manner of CIFAR-10-C (Hendrycks & Dietterich 2019), with one strength each, on images as the
network gets them: lengths are in units of what a pixel's deviation is there, about one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Corruption = Callable[[Tensor, torch.Generator], Tensor]


def noise(x: Tensor, draw: torch.Generator) -> Tensor:
    return x + 0.5 * torch.randn(x.shape, generator=draw).to(x)


def impulses(x: Tensor, draw: torch.Generator) -> Tensor:
    """Six pixels of a hundred are black or white."""
    where = torch.rand((x.shape[0], 1, *x.shape[2:]), generator=draw).to(x.device)
    low, high = x.amin((1, 2, 3), keepdim=True), x.amax((1, 2, 3), keepdim=True)
    return torch.where(where < 0.03, low, torch.where(where > 0.97, high, x))


def blur(x: Tensor, draw: torch.Generator) -> Tensor:
    for _ in range(3):
        x = F.avg_pool2d(F.pad(x, (1, 1, 1, 1), mode="replicate"), 3, 1)
    return x


def pixelate(x: Tensor, draw: torch.Generator) -> Tensor:
    small = F.interpolate(x, scale_factor=0.5, mode="area", recompute_scale_factor=True)
    return F.interpolate(small, size=x.shape[2:], mode="nearest")


def contrast(x: Tensor, draw: torch.Generator) -> Tensor:
    middle = x.mean((1, 2, 3), keepdim=True)
    return middle + 0.3 * (x - middle)


def brightness(x: Tensor, draw: torch.Generator) -> Tensor:
    return x + 1.0


CORRUPTIONS: dict[str, Corruption] = {
    each.__name__: each for each in (noise, impulses, blur, pixelate, contrast, brightness)
}


def corrupted(batches: Iterable[Any], name: str) -> Iterator[tuple[Any, ...]]:
    """(images, target) with damaged images, the same each time."""
    draw = torch.Generator().manual_seed(0)
    for images, *rest in batches:
        yield CORRUPTIONS[name](images, draw), *rest
