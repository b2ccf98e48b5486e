"""What is minimized, and how many were right."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

FIVE = 5


def loss_of(logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """Mean cross-entropy, in float32 or wider.

    ``labels`` are classes (N,), or shares of classes (N, K), which mixup makes.
    """
    return F.cross_entropy(wide(logits), _like(labels, logits), label_smoothing=smoothing)


def right_of(logits: Tensor, labels: Tensor) -> Tensor:
    """How many samples get the largest logit at their class; of shares, the largest counts."""
    truth = labels.argmax(1) if labels.is_floating_point() else labels
    return (logits.argmax(1) == truth).sum()


def right_of_five(logits: Tensor, labels: Tensor) -> Tensor:
    """How many samples have their class among the five largest logits."""
    return (logits.topk(FIVE, dim=1).indices == labels[:, None]).sum()


def wide(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _like(labels: Tensor, logits: Tensor) -> Tensor:
    return labels.to(wide(logits).dtype) if labels.is_floating_point() else labels
