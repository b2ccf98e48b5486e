"""From what lies on the device after an epoch to numbers: one transfer for all of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from normkit.lab.train.evaluating import Score
from normkit.lab.train.plan import Plan
from normkit.lab.train.stepping import History


@dataclass(frozen=True)
class Account:
    """The losses and right answers of an epoch's batches, and what was evaluated after it."""

    losses: list[float]
    right: list[float]
    evaluated: Mapping[str, float]  # test_loss, test_accuracy, validation_loss, …

    def mean_loss(self, plan: Plan) -> float:
        """Over the samples; what fp16 has lost to overflow is left out."""
        sized = [(loss, plan.size(i)) for i, loss in enumerate(self.losses)]
        kept = [(loss * size, size) for loss, size in sized if math.isfinite(loss)]
        return sum(total for total, _ in kept) / max(1, sum(size for _, size in kept))


def settle(history: History, scores: Mapping[str, Score]) -> Account:
    """Waits for the device: the one time in an epoch."""
    rows = history.rows[: history.batches].flatten()
    size = rows.numel()
    found = torch.cat([rows, *(score.sums for score in scores.values())]).tolist()
    evaluated: dict[str, float] = {}
    at = size
    for part, score in scores.items():
        sums = found[at : at + len(score.names)]
        evaluated |= {f"{part}_{name}": value for name, value in score.means(sums).items()}
        at += len(sums)
    return Account(found[0:size:2], found[1:size:2], evaluated)
