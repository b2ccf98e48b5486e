"""Bytes to numbers: value = byte·scale + shift, for each channel."""

from __future__ import annotations

import torch
from torch import Tensor

from normkit.lab.data.records import Moments

KINDS = ("dataset", "fixed", "halves", "none")

# of ImageNet's training set, as everybody uses them
IMAGENET: Moments = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def coefficients(kind: str, moments: Moments, white: int) -> tuple[Tensor, Tensor]:
    """scale and shift, each (1, C, 1, 1), for bytes of which ``white`` means 1.0.

    >>> scale, shift = coefficients("halves", ((0.3,), (0.2,)), 255)
    >>> (torch.tensor([0, 255]) * scale + shift).flatten()
    tensor([-1.,  1.])
    """
    mean, std = (torch.tensor(each, dtype=torch.float64) for each in moments)
    if kind == "dataset":
        std = torch.where(std > 0, std, 1.0)  # a channel that is constant becomes zero
    elif kind == "halves":
        mean, std = torch.full_like(mean, 0.5), torch.full_like(std, 0.5)
    elif kind == "fixed":  # the middle of a byte's range, and the largest distance from it
        mean, std = torch.full_like(mean, 128 / 255), torch.full_like(std, 128 / 255)
    else:
        mean, std = torch.zeros_like(mean), torch.ones_like(std)
    scale, shift = 1 / (white * std), -mean / std
    return scale.float().view(1, -1, 1, 1), shift.float().view(1, -1, 1, 1)


def normalize(images: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    # in place after one conversion: a single new tensor, and faster than mixed types on a CPU
    return images.float().mul_(scale).add_(shift)
