"""Loss and accuracy of a model on a set, batch by batch."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from normkit.lab.train.objective import right_of, wide
from normkit.lab.train.precision import autocast

PIXELS = 1 << 22  # of a batch: 4,096 images of 32×32, 83 of 224×224
LARGEST = 1024


def batch_size(shape: tuple[int, int, int]) -> int:
    """Of evaluation: large, since no gradient needs the activations; the same on all machines."""
    return max(1, min(LARGEST, PIXELS // (shape[1] * shape[2])))


class Score:
    """Sum of losses and number of right answers, on the device; nothing waits for it."""

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(2, dtype=torch.float64, device=device)
        self.samples = 0

    def add(self, model: nn.Module, images: Tensor, labels: Tensor, precision: str) -> None:
        """One batch; the model is in eval mode."""
        with torch.no_grad():
            with autocast(precision, images.device):
                logits = model(images)
            loss = F.cross_entropy(wide(logits), labels, reduction="sum")
            self.sums += torch.stack([loss.double(), right_of(logits, labels).double()])
        self.samples += len(labels)


def means(sums: list[float], samples: int) -> tuple[float, float]:
    """Loss and accuracy. A loss that is not a number is as bad as can be: infinite."""
    loss, right = (value / samples for value in sums)
    return (math.inf if math.isnan(loss) else loss), right
