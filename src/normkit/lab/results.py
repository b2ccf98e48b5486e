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

DONE, DIVERGED, COLLAPSED = "done", "diverged", "collapsed"
FAILED = "failed"  # an error ended the run: there is no result, and none is waited for
# how near to guessing is at chance level: standard errors, and the way from guessing to perfect
CHANCE_ERRORS, CHANCE_SHARE = 3, 0.1
ONE_ANSWER = 0.99  # of the answers are the same: hardly any other


@dataclass(frozen=True)
class TaskMetric:
    """What a number says that a task reports of a set."""

    higher_is_better: bool = True
    percent: bool = True  # a share: written in percent, as papers print it
    # What two variants are paired by. Runs are paired by their seed; a metric of another unit, such
    # as "episode", has a value for each unit of the test set, and the mean of them is the score.
    unit: str = "seed"


LOWER = TaskMetric(higher_is_better=False)
# of classification, and of all results of earlier releases
METRICS: Mapping[str, TaskMetric] = {
    "accuracy": TaskMetric(),
    "error": LOWER,
    "loss": TaskMetric(higher_is_better=False, percent=False),
    "top5_accuracy": TaskMetric(),
    "top5_error": LOWER,
}


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
    test_one_class: float | None = None  # share of the samples that got the most frequent answer
    test_majority: float | None = None  # share of the samples that are of the most frequent class
    seconds: float = 0.0  # of training, since the run began, resumed parts included
    measures: Mapping[str, Any] = field(default_factory=dict)  # name -> number, or one a layer
    metrics: Mapping[str, float] = field(default_factory=dict)  # of other tasks: test_iou, …
    units: Mapping[str, Any] = field(default_factory=dict)  # test_x -> its value for each unit

    @classmethod
    def of(cls, values: Mapping[str, Any], **others: Any) -> Epoch:
        """From values by names such as test_loss, whatever the task calls its metrics."""
        own = {name: value for name, value in values.items() if name in FIELDS}
        lists = {name: value for name, value in values.items() if isinstance(value, list)}
        metrics = {
            name: statistics.fmean(value) if name in lists else value
            for name, value in values.items()
            if name not in own
        }
        return cls(**others, **own, metrics=metrics, units=lists)

    def value(self, metric: str, part: str = "test") -> float | None:
        """A metric on the train, validation or test set after this epoch; None: not evaluated."""
        if (own := self.metrics.get(f"{part}_{metric}")) is not None:
            return own
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


FIELDS = {each.name for each in dataclasses.fields(Epoch)}


@dataclass(frozen=True)
class Result:
    """A finished run. A divergence or a collapse is a result, not a failure."""

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
    # command, started, code: see lab/provenance.py. What may differ while the numbers are the same
    provenance: Mapping[str, str] = field(default_factory=dict)
    classes: int | None = None  # of the data; None for results of earlier releases
    test_samples: int | None = None
    # why its task says that it has learned nothing; None: its accuracy tells, see collapse()
    collapsed: str | None = None
    pictures: tuple[Mapping[str, str], ...] = ()  # caption and png, in base 64
    texts: Mapping[str, str] = field(default_factory=dict)  # what was found, such as a genotype

    def outcome(self, metric: str) -> str:
        """DONE, DIVERGED or COLLAPSED; a score that is not finite diverged, too."""
        score = self.score(metric)
        if score is None or not math.isfinite(score):
            return DIVERGED
        return COLLAPSED if self.collapse() else DONE

    def collapse(self) -> str:
        """Why a run that did not diverge has not learned anything either; "" if it has.

        Its task may have said so. A classifier gives the same answer to every test sample, as a
        dead network does, or it is no better than guessing. Results of earlier releases have
        neither the answers nor the number of classes; there, the accuracies of 1/K and 5/K that
        one answer for K classes gives are told.
        """
        if self.collapsed is not None:
            return self.collapsed
        chosen = [each for each in self.epochs if each.epoch in self.selected]
        shares = [each.test_one_class for each in chosen if each.test_one_class is not None]
        right = [each.test_accuracy for each in chosen if each.test_accuracy is not None]
        if self.status == DIVERGED or not right:
            return ""
        accuracy = statistics.median(right)
        if shares and statistics.median(shares) == 1:
            return f"the same answer to every test sample, {accuracy:.1%} of them right"
        if self._is_majority(chosen, accuracy):
            return f"nearly always the most frequent class, {accuracy:.1%} of the answers right"
        if self.classes and self.test_samples:
            chance = 1 / self.classes
            error = math.sqrt(chance * (1 - chance) / self.test_samples)
            near = min(CHANCE_ERRORS * error, CHANCE_SHARE * (1 - chance))
            if accuracy <= chance + near:
                return f"{accuracy:.1%} right is the chance level of {self.classes} classes"
        elif self._is_one_answer(chosen):
            return f"{accuracy:.1%} right, as one answer to every test sample gives"
        return ""

    def _is_majority(self, chosen: list[Epoch], accuracy: float) -> bool:
        """Whether hardly an answer is another than the class that most samples are of.

        Of data that are nearly all of one class, a good network answers as often as there are
        samples of it: both are held against the share that the other classes have.
        """
        answered = [each.test_one_class for each in chosen if each.test_one_class is not None]
        frequent = [each.test_majority for each in chosen if each.test_majority is not None]
        if not answered or not frequent or not self.test_samples:
            return False
        share, majority = statistics.median(answered), statistics.median(frequent)
        error = math.sqrt(majority * (1 - majority) / self.test_samples)
        others = CHANCE_SHARE * (1 - majority)
        constant = share >= ONE_ANSWER and 1 - share <= others
        return constant and accuracy <= majority + min(CHANCE_ERRORS * error, others)

    @staticmethod
    def _is_one_answer(chosen: list[Epoch]) -> bool:
        """Whether accuracies are just those of one answer where all classes are as frequent."""
        for each in chosen:
            first, five = each.test_accuracy, each.test_top5_accuracy
            if not first or five is None:
                return False
            classes = round(1 / first)
            if classes < 6 or abs(first * classes - 1) > 1e-9 or abs(five - 5 * first) > 1e-9:
                return False
        return bool(chosen)

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
        pictures = tuple(fields.pop("pictures", ()))
        chosen = tuple(fields.pop("selected"))
        return cls(epochs=epochs, selected=chosen, pictures=pictures, **fields)


@dataclass(frozen=True)
class Comparison:
    """A variant against the baseline in one cell, over the seeds that both survived.

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
    low: float  # interval of the difference, from which the verdict is read
    high: float
    effect: float  # mean of the paired differences over their standard deviation
    p_better: float  # paired t-test, one-sided, not corrected: the rule of revisiting BN
    p_worse: float
    p_difference: float  # the same test, two-sided
    p_difference_holm: float  # corrected for all comparisons of the experiment
    p_sign_flip: float
    p_equivalent: float  # two one-sided tests
    p_equivalent_holm: float  # corrected, for the level of the interval
    verdict: str  # "better", "worse", "equivalent", "not shown", "unstable"
    more_seeds: int | None  # about so many more would decide, where not shown
    diverged: int
    baseline_diverged: int
    epochs_to_baseline: float | None  # median, to the baseline's final score
    seconds_to_baseline: float | None
    alpha: float = 0.05  # the chance of error that is granted to the interval
    collapsed: int = 0
    baseline_collapsed: int = 0
    failed: int = 0  # ended by an error, without a result
    baseline_failed: int = 0

    @property
    def lost(self) -> int:
        return self.diverged + self.collapsed + self.failed

    @property
    def losses(self) -> tuple[tuple[str, int], ...]:
        """How many seeds were lost in each way."""
        return (DIVERGED, self.diverged), (COLLAPSED, self.collapsed), (FAILED, self.failed)

    @property
    def baseline_losses(self) -> tuple[tuple[str, int], ...]:
        return (
            (DIVERGED, self.baseline_diverged),
            (COLLAPSED, self.baseline_collapsed),
            (FAILED, self.baseline_failed),
        )

    @property
    def baseline_lost(self) -> int:
        return self.baseline_diverged + self.baseline_collapsed + self.baseline_failed
