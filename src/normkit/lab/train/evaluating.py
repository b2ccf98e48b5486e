"""Loss, accuracy and top-5 accuracy of a model on a set, batch by batch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from normkit.lab.train.objective import FIVE, right_of, right_of_five, wide
from normkit.lab.train.precision import autocast

PIXELS = 1 << 22  # of a batch: 4,096 images of 32×32, 83 of 224×224
LARGEST = 1024
QUANTITIES = ("loss", "accuracy", "top5_accuracy")


def batch_size(shape: tuple[int, int, int]) -> int:
    """Of evaluation: large, since no gradient needs the activations; the same on all machines."""
    return max(1, min(LARGEST, PIXELS // (shape[1] * shape[2])))


class Score:
    """Sum of losses and number of right answers, on the device; nothing waits for it.

    Where there are more than five classes, also how many were right among the five likeliest.
    """

    def __init__(self, device: torch.device, classes: int) -> None:
        self.names = QUANTITIES if classes > FIVE else QUANTITIES[:2]
        self.sums = torch.zeros(len(self.names), dtype=torch.float64, device=device)
        self.samples = 0

    def add(self, model: nn.Module, images: Tensor, labels: Tensor, precision: str) -> None:
        """One batch; the model is in eval mode."""
        with torch.no_grad():
            with autocast(precision, images.device):
                logits = model(images)
            loss = F.cross_entropy(wide(logits), labels, reduction="sum")
            found = [loss, right_of(logits, labels)]
            if len(self.names) > 2:
                found.append(right_of_five(logits, labels))
            self.sums += torch.stack([each.double() for each in found])
        self.samples += len(labels)

    def means(self, sums: Sequence[float]) -> dict[str, float]:
        """Of the sums, read from the device: a loss that is no number is as bad as can be."""
        found = {name: value / self.samples for name, value in zip(self.names, sums, strict=True)}
        if math.isnan(found["loss"]):
            found["loss"] = math.inf
        return found
