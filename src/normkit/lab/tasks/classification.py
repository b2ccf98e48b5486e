"""Classification: images and labels, cross-entropy, accuracy; at chance level it has collapsed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from normkit.errors import OptionError
from normkit.lab import data
from normkit.lab.data import Sets, mix, mixing_weights, soften
from normkit.lab.experiment.records import Setting
from normkit.lab.formats import ImageFormat, autocast, wide
from normkit.lab.results import METRICS, Epoch, TaskMetric
from normkit.lab.tasks.base import Evaluation, Losses, Task, Values, mean_of
from normkit.lab.tasks.criteria import MetricSum
from normkit.lab.tasks.sets import is_own

if TYPE_CHECKING:
    from normkit.lab.train.batches import EpochPlan

FIVE = 5
QUANTITIES = ("loss", "accuracy", "top5_accuracy")
PIXELS = 1 << 22  # of a batch: 4,096 images of 32×32, 83 of 224×224
LARGEST = 1024


class Classification(Task):
    """One of several classes for each image.

    Of a small set a step is given rows of the epoch's plan, and does the augmentation itself; so
    a recorded step holds that as well. Of image files it is given the images.

    A network may give several outputs in training, the first being its logits, as those with
    auxiliary heads do: the losses of the others count ``auxiliary`` times.
    """

    metrics: Mapping[str, TaskMetric] = METRICS
    takes_metrics: ClassVar[bool] = True
    batch_values = ("loss", "accuracy")
    recordable = True
    auxiliary = 0.4  # of DARTS, and of NASNet before it

    def __init__(self, auxiliary: float = auxiliary) -> None:
        if auxiliary < 0:
            raise OptionError(f"auxiliary is {auxiliary:g}, expected 0 or more.")
        self.auxiliary = auxiliary

    def check(self, setting: Setting) -> None:
        if not is_own(setting.data.name):
            data.check_kind(setting.data, "labels")

    def attach(self, setting: Setting, sets: Sets, format: ImageFormat, seed: int) -> None:
        super().attach(setting, sets, format, seed)
        self.recordable = not setting.train.loss

    # ---------------------------------------------------------------- what a batch is

    @property
    def planned(self) -> bool:
        """Whether steps are given rows of a plan."""
        return hasattr(self.sets.train, "plan") and hasattr(self.sets.train, "gather")

    def batches(self, plan: EpochPlan, epoch: int, start: int) -> Iterator[tuple[Tensor, ...]]:
        given = self._without_mixup(plan, epoch, start)
        mixup = self.setting.data.mixup
        if not mixup:
            yield from given
            return
        weights = mixing_weights(
            mixup, len(self.sets.train), seed=self.seed, epoch=epoch, device=self.format.device
        )
        for number, each in enumerate(given, start):
            first = number * plan.batch
            yield (*each, weights[first : first + plan.size(number)])

    def _without_mixup(
        self, plan: EpochPlan, epoch: int, start: int
    ) -> Iterator[tuple[Tensor, ...]]:
        if not self.planned:
            for (batch,) in super().batches(plan, epoch, start):
                yield tuple(batch)
            return
        loader: Any = self.sets.train
        rows = loader.plan(self.seed, epoch)
        for first in range(start * plan.batch, plan.samples, plan.batch):
            yield (rows[first : min(first + plan.batch, plan.samples)],)

    def read(self, *given: Any) -> tuple[Tensor, Tensor]:
        """Images and labels of a batch: tensor operations alone, for inside a step."""
        mixed = self.setting.data.mixup > 0
        given, weights = (given[:-1], given[-1]) if mixed else (given, None)
        loader: Any = self.sets.train
        images, labels = loader.gather(*given) if self.planned else given
        images, labels = self.format(images), labels.to(self.format.device, non_blocking=True)
        if weights is not None:
            soft = soften(labels, self.sets.classes).to(images.dtype)
            images, labels = mix(images, soft, weights.to(images.dtype))
        return images, labels

    def evaluation_batches(self, part: str) -> Iterator[tuple[Tensor, Tensor]]:
        for images, labels in getattr(self.sets, part).batches(batch_size(self.sets.shape)):
            yield self.format(images), labels.to(self.format.device, non_blocking=True)

    def try_model(
        self, model: nn.Module, samples: int, classes: int, shape: tuple[int, ...]
    ) -> None:
        output, *_ = outputs_of(model(self.example(shape, samples)))
        if not isinstance(output, Tensor) or output.shape != (samples, classes):
            got = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise OptionError(
                f"the model gives {got} for {samples} images of {classes} classes, expected a "
                f"tensor ({samples}, {classes})."
            )

    def load(self, setting: Setting, device: torch.device | str) -> Sets:
        sets = super().load(setting, device)
        if sets.classes < 1:
            raise OptionError(
                f"{setting.data.name} does not say how many classes there are. Try "
                '{"train": …, "test": …, "classes": 10}, or labels in its attribute targets.'
            )
        train = setting.train  # a loss of one's own may count classes as it likes
        if not train.loss or (train.loss.startswith("torch.") and not train.loss_options):
            for loader in filter(None, (sets.train, sets.validation, sets.test)):
                if hasattr(loader, "label_classes"):
                    loader.label_classes = sets.classes
        return sets

    def check_metric(self, metric: str, classes: int) -> None:
        """Of five classes or fewer the right one is always among the five likeliest."""
        if "top5" in metric and classes <= FIVE:
            raise OptionError(
                f"metric is {metric!r}, and there are {classes} classes. Try accuracy or error."
            )

    # ---------------------------------------------------------------- training and judging

    def loss(self, model: nn.Module, batch: Any) -> Losses:
        images, labels = batch
        with self.format.autocast():
            logits, *further = outputs_of(model(images))
        loss = self.compared(logits, labels)
        for other in further:
            loss = loss + self.auxiliary * self.compared(other, labels)
        return {"loss": loss, "accuracy": correct(logits, labels)}

    def compared(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss of one output."""
        if self.criterion is None:
            return loss_of(logits, labels, self.setting.train.label_smoothing)
        return self.criterion(wide(logits), labels)

    def epoch_values(self, rows: Mapping[str, Sequence[float]], sizes: Sequence[int]) -> Values:
        """The right answers of each batch were counted, not averaged."""
        right = sum(rows["accuracy"]) / sum(sizes)
        return {"loss": mean_of(rows["loss"], sizes), "accuracy": right}

    def measured_loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Neither smoothed nor in a shorter number type."""
        images, labels = batch
        return (self.criterion or loss_of)(outputs_of(model(images))[0], labels)

    def agreement(self, output: Any, target: Any) -> float:
        return float(correct(output, target)) / len(target)

    def evaluation(self, part: str) -> ClassificationScore:
        score = ClassificationScore(
            self.format.device, self.sets.classes, self.format.precision, part
        )
        score.criterion = self.criterion
        score.own_metrics = [metric.start(self.format.device) for metric in self.own_metrics]
        return score

    def collapsed(self, epochs: Sequence[Epoch]) -> str | None:
        """``Result.collapse`` reads it from the accuracies, as of results of earlier releases."""
        return None


class ClassificationScore(Evaluation):
    """Sum of losses and number of right answers on a set, on the device; nothing waits for it.

    Where there are more than five classes, also how many were right among the five likeliest. How
    often each class was the answer tells a network that gives the same one to all.
    """

    def __init__(
        self, device: torch.device, classes: int, precision: str = "float32", part: str = "test"
    ) -> None:
        self.names = QUANTITIES if classes > FIVE else QUANTITIES[:2]
        self.sums = torch.zeros(len(self.names), dtype=torch.float64, device=device)
        self.answers = torch.zeros(classes, dtype=torch.float64, device=device)
        self.truths = torch.zeros_like(self.answers)
        self.samples, self.precision, self.part = 0, precision, part
        self.criterion: Callable[[Any, Any], Tensor] | None = None  # instead of cross-entropy
        self.own_metrics: list[MetricSum] = []

    def add(self, model: nn.Module, batch: Any) -> None:
        images, labels = batch
        with autocast(self.precision, images.device):
            logits = model(images)
        if self.criterion is None:
            loss = F.cross_entropy(wide(logits), labels, reduction="sum")
        else:
            loss = self.criterion(wide(logits), labels) * len(labels)
        for metric in self.own_metrics:
            metric.add(wide(logits), labels)
        sums = [loss, correct(logits, labels)]
        answer = logits.argmax(1)
        self.answers.scatter_add_(0, answer, torch.ones_like(answer, dtype=torch.float64))
        truth = labels.argmax(1) if labels.is_floating_point() else labels
        truth = truth.clamp(0, len(self.truths) - 1)  # an own loss may leave out some by a -100
        self.truths.scatter_add_(0, truth, torch.ones_like(truth, dtype=torch.float64))
        if len(self.names) > 2:
            five = logits.topk(FIVE, dim=1).indices
            sums.append((five == labels[:, None]).sum())
        self.sums += torch.stack([each.double() for each in sums])
        self.samples += len(labels)

    def values(self) -> dict[str, float | list[float]]:
        """A loss that is NaN is as bad as can be."""
        ends = torch.stack([self.answers.max(), self.truths.max()])
        *sums, most, majority = torch.cat([self.sums, ends]).tolist()
        values = {name: value / self.samples for name, value in zip(self.names, sums, strict=True)}
        if math.isnan(values["loss"]):
            values["loss"] = math.inf
        if self.part == "test":
            values["one_class"] = most / self.samples
            values["majority"] = majority / self.samples
        return {**values, **{each.metric.name: each.value() for each in self.own_metrics}}


# ------------------------------------------------------------------ of one batch


def outputs_of(output: Any) -> tuple[Any, ...]:
    """The logits, and those of auxiliary heads, which some networks give in training."""
    return tuple(output) if isinstance(output, tuple) else (output,)


def loss_of(logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """Mean cross-entropy, in float32 or wider.

    ``labels`` are classes (N,), or shares of classes (N, K), which mixup makes.
    """
    logits = wide(logits)
    labels = labels.to(logits.dtype) if labels.is_floating_point() else labels
    return F.cross_entropy(logits, labels, label_smoothing=smoothing)


def correct(logits: Tensor, labels: Tensor) -> Tensor:
    """How many samples get the largest logit at their class; of shares, the largest counts."""
    truth = labels.argmax(1) if labels.is_floating_point() else labels
    return (logits.argmax(1) == truth).sum()


def batch_size(shape: tuple[int, int, int]) -> int:
    """Of evaluation: large, since no gradient needs the activations; the same on all machines."""
    return max(1, min(LARGEST, PIXELS // (shape[1] * shape[2])))
