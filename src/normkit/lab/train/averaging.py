"""Averaged weights: an exponential moving average of a model beside it, which is evaluated."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn


class AveragedWeights:
    """A copy of a model in eval mode whose numbers follow those of the model.

    After step n, each is d·average + (1 − d)·model with d = min(decay, n / (n + 9)), so that the
    first weights are soon forgotten. Running statistics are averaged as parameters are; counters
    are copied. Everything happens in place, so that a step with it can be recorded.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        mine = [*self.model.parameters(), *self.model.buffers()]
        theirs = [*model.parameters(), *model.buffers()]
        pairs = list(zip(mine, theirs, strict=True))
        self.averages = [(m, t) for m, t in pairs if m.is_floating_point()]
        self.copies = [(m, t) for m, t in pairs if not m.is_floating_point()]
        device = theirs[0].device if theirs else torch.device("cpu")
        self.step = torch.zeros((), device=device)

    @torch.no_grad()
    def update(self) -> None:
        """After a step of the optimizer; waits for nothing."""
        self.step += 1
        new = (1 - self.step / (self.step + 9)).clamp(min=1 - self.decay)  # weight of the model
        for average, value in self.averages:
            average.lerp_(value, new.to(average.dtype))
        for kept, value in self.copies:
            kept.copy_(value)

    def tensors(self) -> Iterator[Tensor]:
        yield self.step
        yield from (mine for mine, _ in (*self.averages, *self.copies))

    def state_dict(self) -> dict[str, Any]:
        return {"values": list(self.tensors())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for mine, saved in zip(self.tensors(), state["values"], strict=True):
            mine.copy_(saved)
