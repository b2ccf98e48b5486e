"""A loss and metrics of the author's choice: torch's, torchmetrics', or a function of one's own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from normkit.errors import NormkitError, OptionError, nearest
from normkit.inspection.batches import samples_in
from normkit.lab.data.datasets import explained
from normkit.lab.experiment.records import Setting
from normkit.lab.own_code import find, source_place
from normkit.lab.results import TaskMetric

METRIC_KEYS = ("use", "options", "higher_is_better", "percent")


class BadReference(OptionError):
    """A key of the file whose value names something that cannot be used."""

    def __init__(self, key: tuple[str, ...], reason: str) -> None:
        self.key, self.reason = key, reason
        super().__init__(f"{'.'.join(key)}: {reason}")


@contextmanager
def named_by(*key: str) -> Iterator[None]:
    """An error is of the value of this key."""
    try:
        yield
    except BadReference:
        raise
    except NormkitError as error:
        raise BadReference(key, str(error)) from error


def criterion_of(setting: Setting) -> OwnLoss | None:
    """What train.loss names: a class like torch.nn:HuberLoss, or a function (output, target)."""
    train = setting.train
    if not train.loss:
        return None
    with named_by("train", "loss"):
        return OwnLoss(train.loss, train.loss_options, setting.code.folder)


class OwnLoss:
    """A loss (output, target) of the author's choice, which has to be one number."""

    def __init__(self, reference: str, options: Mapping[str, Any], folder: str) -> None:
        found = find(reference, folder)
        self.options: Mapping[str, Any] = options
        self.place = source_place(found)
        self.name = f"train.loss {reference}{self.place}"
        if isinstance(found, type):
            with explained(f"{reference} could not be made"):
                found, self.options = found(**options), {}
        if not callable(found):
            raise OptionError(f"{reference} is a {type(found).__name__}, not a function.")
        self.function = found

    def __call__(self, output: Any, target: Any) -> Tensor:
        with explained(f"{self.name} failed"):
            loss = self.function(output, target, **self.options)
        learns = isinstance(output, Tensor) and output.requires_grad  # not in an evaluation
        if isinstance(loss, Tensor) and not loss.dim() and (loss.requires_grad or not learns):
            return loss
        raise OptionError(
            f"{self.name} gave {shown_loss(loss)}, expected one number, a tensor () with a "
            f"gradient. Try {loss_hint(loss)}."
        )


def shown_loss(value: Any) -> str:
    """What came instead of a loss."""
    if not isinstance(value, Tensor):
        return "None" if value is None else f"{value!r:.40}, of type {type(value).__name__}"
    return f"a tensor {tuple(value.shape)}" + (" without a gradient" * (not value.requires_grad))


def loss_hint(value: Any) -> str:
    """What may make a loss of it."""
    if isinstance(value, Tensor) and value.dim():
        return ".mean()"
    if isinstance(value, Tensor | float | int):
        return "tensor operations alone, without .item(), .detach() and float()"
    return "to return the loss"


class OwnMetric:
    """A metric of [metrics]: a class with update and compute, or a function of a batch."""

    def __init__(self, name: str, table: Mapping[str, Any], folder: str) -> None:
        for key in table:
            if key not in METRIC_KEYS:
                raise OptionError(f"metrics.{name} has {key!r}. {nearest(key, METRIC_KEYS)}")
        self.name, self.reference = name, str(table.get("use", ""))
        with named_by("metrics", name, "use"):
            self.kind = find(self.reference, folder)
        self.options = dict(table.get("options", {}))
        example = self.make() if isinstance(self.kind, type) else self.kind
        better = table.get("higher_is_better", getattr(example, "higher_is_better", None))
        if better is None:
            raise OptionError(
                f"metrics.{name}: {self.reference}{source_place(self.kind)} does not say which way "
                "is better. Try higher_is_better = true."
            )
        bounds = [getattr(example, f"plot_{end}_bound", None) for end in ("lower", "upper")]
        self.about = TaskMetric(bool(better), bool(table.get("percent", bounds == [0.0, 1.0])))

    def make(self) -> Any:
        with explained(f"metrics.{self.name}: {self.reference} could not be made"):
            return self.kind(**self.options) if isinstance(self.kind, type) else None

    def start(self, device: torch.device) -> MetricSum:
        return MetricSum(self, self.make(), device)


class MetricSum:
    """A metric over one set."""

    def __init__(self, metric: OwnMetric, state: Any, device: torch.device) -> None:
        self.metric = metric
        self.state: Any = state.to(device) if isinstance(state, nn.Module) else state
        self.total, self.samples = 0.0, 0

    def add(self, output: Any, target: Any) -> None:
        with explained(f"metric {self.metric.name}{source_place(self.metric.kind)} failed"):
            if self.state is not None:
                self.state.update(output, target)
                return
            size = samples_in((output,))
            self.total += float(self.metric.kind(output, target, **self.metric.options)) * size
            self.samples += size

    def value(self) -> float:
        if self.state is None:
            return self.total / max(1, self.samples)
        with explained(f"metric {self.metric.name}{source_place(self.metric.kind)} failed"):
            value = self.state.compute()
            number = torch.as_tensor(value)
        if number.numel() != 1:
            raise OptionError(
                f"metric {self.metric.name} gave {tuple(number.shape)}, expected one number. Try "
                'options such as average = "macro".'
            )
        return float(number)
