"""All that a diagnosis has to go by."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import nn

from normkit.diagnosis.batches import Batch
from normkit.diagnosis.findings.bounds import SURE
from normkit.diagnosis.findings.data import Data
from normkit.diagnosis.findings.layer import Layer
from normkit.diagnosis.findings.looking import Look
from normkit.diagnosis.observe.measurements import Measurements
from normkit.inspection import Survey

State = Mapping[str, Any]


class Gap(NamedTuple):
    """Losses of the same samples with running and with batch statistics."""

    eval: float
    batch: float
    error: float  # standard error of the difference
    pairs: int

    @property
    def difference(self) -> float:
        return self.eval - self.batch

    @property
    def sure(self) -> bool:
        """Whether one of the modes is really better; few numbers have to show more."""
        if not math.isfinite(self.difference):
            return True
        wanted = SURE * (1 + 5 / (self.pairs - 1)) if self.pairs > 1 else math.inf
        return abs(self.difference) > wanted * self.error


@dataclass(frozen=True, eq=False)
class Evidence:
    """A model, what it did on data, and whatever else was given."""

    model: nn.Module
    survey: Survey
    layers: tuple[Layer, ...]  # in the order in which they run
    batches: Sequence[Batch]
    data: Data
    eval: Look
    own: Look | None = None
    train_data: Data | None = None
    trained: Look | None = None
    steps: int | None = None
    ranks: Sequence[State] = ()
    ema_of: State | None = None
    optimizer: torch.optim.Optimizer | None = None
    measured: Measurements | None = None
    nats: bool = False  # whether losses are cross-entropies of classes

    @property
    def loader(self) -> str:
        """The argument whose data statistics should come from."""
        return "loader" if self.train_data is None else "train_loader"

    @property
    def calibrating(self) -> str:
        """The line that gives a model exact statistics."""
        return f"nk.calibrate(model, {self.loader})"

    @property
    def repairing(self) -> str:
        """The same, unless the weights fit the statistics as they are: then new ones do harm."""
        if self.gap is not None and self.gap.sure and self.gap.difference < 0:
            return "model.train()  # and train on; the weights fit the statistics as they are"
        return self.calibrating

    @cached_property
    def gap(self) -> Gap | None:
        """The losses of both modes; None without a loss."""
        ours = self.eval.loss
        theirs = None if self.own is None else self.own.loss
        if ours is None or theirs is None or len(ours) != len(theirs):
            return None
        difference = (ours - theirs).double()
        count = len(difference)
        error = float(difference.std()) / math.sqrt(count) if count > 1 else math.inf
        return Gap(float(ours.mean()), float(theirs.mean()), error, count)

    def severity(self, layers: Sequence[Layer]) -> str:
        """Of statistics that are off: serious if a layer is wrong, or if the loss has doubled."""
        gap = self.gap
        harm = gap is not None and gap.sure and not gap.eval < 2 * gap.batch
        return "serious" if harm or any(layer.wrong for layer in layers) else "warning"

    def running(self) -> list[Layer]:
        """Norms with running statistics that are used as such."""
        return [layer for layer in self.layers if layer.kept is not None]
