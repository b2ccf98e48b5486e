"""What a run leaves behind: plain records that are stored, compared and shown."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from normkit.errors import OptionError

METRICS = ("accuracy", "error", "loss", "top5_accuracy", "top5_error")
DONE, DIVERGED = "done", "diverged"


def higher_is_better(metric: str) -> bool:
    return metric.endswith("accuracy")


@dataclass(frozen=True)
class Epoch:
    """The state after an epoch (1, 2, …; 0 is before training, where it is watched)."""

    epoch: int
    lr: float = 0.0
    train_loss: float | None = None  # mean over the epoch's batches, as trained
    train_accuracy: float | None = None
    validation_loss: float | None = None
    validation_accuracy: float | None = None
    validation_top5_accuracy: float | None = None  # among the five likeliest, of more classes
    test_loss: float | None = None
    test_accuracy: float | None = None
    test_top5_accuracy: float | None = None
    seconds: float = 0.0  # of training, since the run began, resumed parts included
    measures: Mapping[str, Any] = field(default_factory=dict)  # name -> number, or one a layer

    def value(self, metric: str, part: str = "test") -> float | None:
        """A metric on the train, validation or test set after this epoch; None: not evaluated."""
        right = metric.replace("error", "accuracy")
        value: float | None = getattr(self, f"{part}_{right}", None)
        return value if value is None or right == metric else 1 - value

    def test(self, metric: str) -> float:
        """A metric on the test set, where it has to be known."""
        value = self.value(metric)
        if value is None:
            hint = " Top-5 is recorded where there are more than 5 classes." * ("top5" in metric)
            raise OptionError(f"Epoch {self.epoch} of a run has no {metric}.{hint}")
        return value


@dataclass(frozen=True)
class Result:
    """A finished run. A divergence is a result, not a failure."""

    run: str  # id
    status: str  # DONE or DIVERGED
    selected: tuple[int, ...]  # the epoch that counts, or several: the median of them counts
    epochs: tuple[Epoch, ...]
    seconds: float  # training alone
    parameters: int
    peak_memory: int | None = None  # bytes, on a GPU
    images_per_second: float | None = None
    environment: Mapping[str, str] = field(default_factory=dict)  # versions, device, backend
    note: str = ""  # what diverged, and when

    def score(self, metric: str) -> float | None:
        """A metric on the test set where it counts; None if it diverged."""
        if self.status == DIVERGED:
            return None
        chosen = [each for each in self.epochs if each.epoch in self.selected]
        return statistics.median(each.test(metric) for each in chosen)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Result:
        fields = json.loads(text)
        epochs = tuple(Epoch(**epoch) for epoch in fields.pop("epochs"))
        return cls(epochs=epochs, selected=tuple(fields.pop("selected")), **fields)


@dataclass(frozen=True)
class Comparison:
    """A variant against the baseline in one cell, over the seeds that both finished.

    Differences are signed so that positive is better, whatever the metric.
    """

    variant: str
    baseline: str
    cell: tuple[tuple[str, Any], ...]
    pairs: int
    mean: float
    std: float
    baseline_mean: float
    baseline_std: float
    difference: float
    low: float  # 95 % interval of the difference
    high: float
    effect: float  # mean of the paired differences over their standard deviation
    p_better: float  # paired t-test, one-sided: the rule of revisiting BN
    p_worse: float
    p_better_holm: float  # corrected for all comparisons of the experiment
    p_worse_holm: float
    p_sign_flip: float
    p_equivalent: float  # two one-sided tests
    verdict: str  # "better", "worse", "equivalent", "not shown"
    more_seeds: int | None  # about so many more would decide, where not shown
    diverged: int
    baseline_diverged: int
    epochs_to_baseline: float | None  # median, to the baseline's final score
    seconds_to_baseline: float | None
    p_equivalent_holm: float = math.nan  # corrected as the others; the verdict is drawn from these
