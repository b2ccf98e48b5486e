"""Soft labels: label smoothing, and mixup."""

from __future__ import annotations

import torch
from torch import Tensor

from normkit.lab.data.seeding import stream


def soften(labels: Tensor, classes: int, smoothing: float = 0.0) -> Tensor:
    """(B,) int64 to (B, classes) float32: 1 − smoothing for the label, the rest for all alike.

    >>> soften(torch.tensor([1]), 4, 0.2)
    tensor([[0.0500, 0.8500, 0.0500, 0.0500]])
    """
    floor = smoothing / classes
    soft = torch.full((labels.shape[0], classes), floor, device=labels.device)
    return soft.scatter_(1, labels.unsqueeze(1), 1 - smoothing + floor)


def mixing_weights(
    alpha: float, samples: int, *, seed: int, epoch: int, device: torch.device | str = "cpu"
) -> Tensor:
    """An epoch's weights of mixup, one a sample, from the beta distribution of (alpha, alpha)."""
    with torch.random.fork_rng(devices=[]):
        # not torch.manual_seed, which would also reset the generators of the GPUs
        torch.default_generator.manual_seed(stream("mixup", seed, epoch))
        shape = torch.tensor(alpha, dtype=torch.float64)
        weights = torch.distributions.Beta(shape, shape).sample((samples,)).float()
    return weights.to(device)


def mix(images: Tensor, soft: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Each sample blended with the one before it in the batch, images and soft labels alike.

    The order of a batch is random already, so its neighbour is as good as any other partner.

    >>> images = torch.tensor([0.0, 4.0]).view(2, 1, 1, 1)
    >>> images, soft = mix(images, torch.eye(2), torch.tensor([1, 0.75]))
    >>> images.flatten(), soft[1]
    (tensor([0., 3.]), tensor([0.2500, 0.7500]))
    """
    images = torch.lerp(images.roll(1, 0), images, weights.view(-1, 1, 1, 1))
    return images, torch.lerp(soft.roll(1, 0), soft, weights.view(-1, 1))
