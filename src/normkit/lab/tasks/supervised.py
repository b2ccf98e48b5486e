"""Inputs and targets of any kind, with a loss of torch's or one's own: regression, masks, …"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from normkit.errors import OptionError, ShapeError
from normkit.inspection.batches import read_batch, samples_in
from normkit.lab.experiment.records import Setting
from normkit.lab.formats import wide
from normkit.lab.results import Epoch, TaskMetric
from normkit.lab.tasks.base import Evaluation, Losses, Task, Values


class Supervised(Task):
    """What train.loss says of the model's output and the target; [metrics] says what else counts.

    It has collapsed where the output is the same for every sample of the test set.
    """

    metrics: Mapping[str, TaskMetric] = {"loss": TaskMetric(False, percent=False)}
    takes_metrics: ClassVar[bool] = True

    def check(self, setting: Setting) -> None:
        if not setting.train.loss:
            raise OptionError(
                'task "supervised" needs a loss. Try train.loss = "torch.nn:HuberLoss", or a '
                "function (output, target) of your own: file.py:name."
            )

    def loss(self, model: nn.Module, batch: Any) -> Losses:
        with self.format.autocast():
            output = self.forward(model, batch)
        return self.compared(output, read_batch(batch, model).target)

    def compared(self, output: Any, target: Any) -> Tensor:
        """The loss of an output that fits its target."""
        assert self.criterion is not None
        return self.criterion(fitted(output, target), target)

    def evaluation(self, part: str) -> SupervisedScore:
        return SupervisedScore(self)

    def collapsed(self, epochs: Sequence[Epoch]) -> str:
        same = [epoch.metrics.get("test_constant") for epoch in epochs]
        return "the same output for every test sample" if same and all(same) else ""


class SupervisedScore(Evaluation):
    """The mean of the loss, and the metrics of the file."""

    def __init__(self, task: Supervised) -> None:
        self.task = task
        self.sums = [metric.start(task.format.device) for metric in task.own_metrics]
        self.loss = torch.zeros((), dtype=torch.float64, device=task.format.device)
        self.samples = 0
        self.first: Tensor | None = None
        self.constant = torch.ones((), dtype=torch.bool, device=task.format.device)

    def add(self, model: nn.Module, batch: Any) -> None:
        with self.task.format.autocast():
            output = self.task.forward(model, batch)
        target, size = read_batch(batch, model).target, samples_in(batch)
        self.loss += self.task.compared(output, target).double() * size
        self.samples += size
        if isinstance(output, Tensor) and len(output):
            self.first = output[:1] if self.first is None else self.first
            self.constant &= (output == self.first).all()
        for metric in self.sums:
            metric.add(fitted(output, target), target)

    def values(self) -> Values:
        loss = self.loss.item() / max(1, self.samples)
        values: dict[str, float | list[float]] = {"loss": math.inf if math.isnan(loss) else loss}
        values |= {each.metric.name: each.value() for each in self.sums}
        values["constant"] = float(self.constant and self.samples > 1)
        return values


def fitted(output: Any, target: Any) -> Any:
    """An output in float32 or wider, (N,) for (N, 1) where the targets are (N,).

    One that would be broadcast against its target is refused.
    """
    if not isinstance(output, Tensor) or not output.is_floating_point():
        return output
    output = wide(output)
    if not isinstance(target, Tensor) or not target.is_floating_point():
        return output
    if output.numel() == target.numel():
        return output.view_as(target)
    if output.dim() != target.dim():
        raise ShapeError(
            f"The model gives {tuple(output.shape)} for targets {tuple(target.shape)}. Say "
            '"classes", the number of outputs, beside train and test of the data.'
        )
    return output
