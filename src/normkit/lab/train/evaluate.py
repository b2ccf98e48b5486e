"""Classification: the loss that is minimized, the metrics, evaluation, and which epochs count."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from normkit.errors import OptionError, nearest
from normkit.lab.experiment import Train
from normkit.lab.experiment.rules import CHOICES
from normkit.lab.results import Epoch
from normkit.lab.train.batches import EpochPlan
from normkit.lab.train.cuda_graph import WARM_UP
from normkit.lab.train.device import autocast

FIVE = 5
QUANTITIES = ("loss", "accuracy", "top5_accuracy")
PIXELS = 1 << 22  # of a batch: 4,096 images of 32×32, 83 of 224×224
LARGEST = 1024
LAST = 5  # epochs of median_last_5


# ------------------------------------------------------------------ of one batch


def loss_of(logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """Mean cross-entropy, in float32 or wider.

    ``labels`` are classes (N,), or shares of classes (N, K), which mixup makes.
    """
    logits = _wide(logits)
    labels = labels.to(logits.dtype) if labels.is_floating_point() else labels
    return F.cross_entropy(logits, labels, label_smoothing=smoothing)


def correct(logits: Tensor, labels: Tensor) -> Tensor:
    """How many samples get the largest logit at their class; of shares, the largest counts."""
    truth = labels.argmax(1) if labels.is_floating_point() else labels
    return (logits.argmax(1) == truth).sum()


def accuracy(logits: Tensor, labels: Tensor) -> float:
    return float(correct(logits, labels)) / len(labels)


def batch_size(shape: tuple[int, int, int]) -> int:
    """Of evaluation: large, since no gradient needs the activations; the same on all machines."""
    return max(1, min(LARGEST, PIXELS // (shape[1] * shape[2])))


def _wide(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


# ------------------------------------------------------------------ sums on the device


class History:
    """Loss and number of right answers of every batch of an epoch, on the device."""

    def __init__(self, batches: int, device: torch.device) -> None:
        self.batches = batches
        # and room for the steps that are done to record one
        rows = batches + WARM_UP + 2
        self.rows = torch.zeros(rows, 2, dtype=torch.float64, device=device)
        self.next = torch.zeros(1, dtype=torch.long, device=device)

    def add(self, loss: Tensor, right: Tensor) -> None:
        row = torch.stack([loss.detach().double(), right.double()])
        self.rows.index_copy_(0, self.next, row[None])
        self.next.add_(1)

    def restart(self) -> None:
        self.next.zero_()


class Score:
    """Sum of losses and number of right answers on a set, on the device; nothing waits for it.

    Where there are more than five classes, also how many were right among the five likeliest. How
    often each class was the answer tells a network that gives the same one to all.
    """

    def __init__(self, device: torch.device, classes: int) -> None:
        self.names = QUANTITIES if classes > FIVE else QUANTITIES[:2]
        self.sums = torch.zeros(len(self.names), dtype=torch.float64, device=device)
        self.answers = torch.zeros(classes, dtype=torch.float64, device=device)
        self.samples = 0

    def add(self, model: nn.Module, images: Tensor, labels: Tensor, precision: str) -> None:
        """One batch; the model is in eval mode."""
        with torch.no_grad():
            with autocast(precision, images.device):
                logits = model(images)
            loss = F.cross_entropy(_wide(logits), labels, reduction="sum")
            sums = [loss, correct(logits, labels)]
            answer = logits.argmax(1)
            self.answers.scatter_add_(0, answer, torch.ones_like(answer, dtype=torch.float64))
            if len(self.names) > 2:
                five = logits.topk(FIVE, dim=1).indices
                sums.append((five == labels[:, None]).sum())
            self.sums += torch.stack([each.double() for each in sums])
        self.samples += len(labels)

    def means(self, sums: Sequence[float]) -> dict[str, float]:
        """Of the sums, read from the device: a loss that is NaN is as bad as can be."""
        means = {name: value / self.samples for name, value in zip(self.names, sums, strict=True)}
        if math.isnan(means["loss"]):
            means["loss"] = math.inf
        return means


@dataclass(frozen=True)
class EpochNumbers:
    """The losses and right answers of an epoch's batches, and what was evaluated after it."""

    losses: list[float]
    right: list[float]
    evaluated: Mapping[str, float]  # test_loss, test_accuracy, validation_loss, …

    @classmethod
    def read(cls, history: History, scores: Mapping[str, Score]) -> EpochNumbers:
        """One transfer for all of them, which waits for the device: the one time in an epoch."""
        rows = history.rows[: history.batches].flatten()
        size = rows.numel()
        sets = [part for s in scores.values() for part in (s.sums, s.answers.max()[None])]
        numbers = torch.cat([rows, *sets]).tolist()
        evaluated: dict[str, float] = {}
        at = size
        for part, score in scores.items():
            sums = numbers[at : at + len(score.names)]
            evaluated |= {f"{part}_{name}": value for name, value in score.means(sums).items()}
            at += len(sums) + 1
            if part == "test":
                evaluated["test_one_class"] = numbers[at - 1] / score.samples
        return cls(numbers[0:size:2], numbers[1:size:2], evaluated)

    def mean_loss(self, plan: EpochPlan) -> float:
        """Over the samples; what fp16 has lost to overflow is left out."""
        sized = [(loss, plan.size(i)) for i, loss in enumerate(self.losses)]
        kept = [(loss * size, size) for loss, size in sized if math.isfinite(loss)]
        return sum(total for total, _ in kept) / max(1, sum(size for _, size in kept))


# ------------------------------------------------------------------ which epochs count


def is_evaluated(train: Train, epoch: int) -> bool:
    """Whether an epoch, counted from 1, is evaluated: as often as asked, and where it may count."""
    if train.select == "best_validation":
        return True
    counts = LAST if train.select == "median_last_5" else 1
    return epoch > train.epochs - counts or epoch % train.evaluate_every == 0


def selected(train: Train, epochs: Sequence[Epoch]) -> tuple[int, ...]:
    """The epoch that counts, or the last five, of which the median will.

    Of equally good validation accuracies the first counts: only a strict improvement replaces it.

    >>> epochs = [Epoch(e, validation_accuracy=a) for e, a in ((1, 0.5), (2, 0.7), (3, 0.7))]
    >>> selected(Train(epochs=3, select="best_validation"), epochs)
    (2,)
    """
    if train.select == "best_validation":
        evaluated = [e for e in epochs if e.validation_accuracy is not None]
        return (max(evaluated, key=lambda e: (e.validation_accuracy, -e.epoch)).epoch,)
    counts = LAST if train.select == "median_last_5" else 1
    return tuple(e.epoch for e in epochs if e.epoch > max(0, train.epochs - counts))


def check_selection(train: Train, validation: bool) -> None:
    """Refuse a selection that cannot be made, before anything is trained."""
    if train.select not in CHOICES["train.select"]:
        hint = nearest(train.select, CHOICES["train.select"])
        raise OptionError(f"train.select is {train.select!r}. {hint}")
    if train.select == "best_validation" and not validation:
        raise OptionError(
            'train.select = "best_validation" needs a validation set. Try data.validation = 0.1.'
        )
