"""How settings, points of the grid, scores and differences are written."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from normkit.lab.experiment import Cell
from normkit.lab.results import TaskMetric
from normkit.reporting.text import NONE, is_finite

# paths of a setting, as one would say them: the name of an axis, and a value of it in a sentence
AXES = {
    "train.worker_batch": ("samples a worker", "{} samples a worker"),
    "train.batch": ("batch size", "batch size {}"),
    "train.lr": ("learning rate", "learning rate {}"),
    "train.epochs": ("epochs", "{} epochs"),
    "train.accumulate": ("iteration size", "iteration size {}"),
    "data.subset": ("training samples", "{} training samples"),
    "data.name": ("data", "{}"),
    "model.name": ("model", "{}"),
    "norm.groups": ("groups", "{} groups"),
}


def axis_words(path: str) -> str:
    """
    >>> axis_words("train.worker_batch"), axis_words("train.weight_decay")
    ('samples a worker', 'weight decay')
    """
    return AXES[path][0] if path in AXES else path.rpartition(".")[2].replace("_", " ")


def value_words(value: Any) -> str:
    """A value of a setting, short: "torchvision:resnet18" is "resnet18"."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, str):
        library, colon, name = value.partition(":")
        return name if colon and library in ("timm", "torchvision", "native") else value
    if isinstance(value, (tuple, list)):
        return ", ".join(map(value_words, value)) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{key}={value_words(each)}" for key, each in value.items()) or "none"
    return str(value)


def cell_words(cell: Cell) -> str:
    """
    >>> cell_words((("model.name", "timm:resnet50"), ("train.worker_batch", 2)))
    'resnet50, 2 samples a worker'
    """
    return ", ".join(_cell_word(path, value) for path, value in cell)


def _cell_word(path: str, value: Any) -> str:
    if path == "train.worker_batch" and value is None:
        return "the whole batch on one worker"
    pattern = AXES[path][1] if path in AXES else axis_words(path) + " {}"
    text = value_words(value)
    head, _, tail = pattern.partition("{} ")
    if text == "1" and tail:  # one sample a worker
        first, _, rest = tail.partition(" ")
        return f"{head}1 {first.removesuffix('s')} {rest}".strip()
    return pattern.replace("{}", text)


def at(cell: Cell) -> str:
    """What stands behind a name: " at 2 samples a worker"; nothing without a grid."""
    if not cell:
        return ""
    named = any(isinstance(value, str) for _, value in cell)
    return f" {'for' if named else 'at'} {cell_words(cell)}"


@dataclass(frozen=True)
class Metric:
    """How a metric is written: shares in percent, as papers print them."""

    name: str
    about: TaskMetric

    @property
    def percent(self) -> bool:
        return self.about.percent

    @property
    def words(self) -> str:
        return self.name.replace("top5_", "top-5 ").replace("_", " ")

    @property
    def title(self) -> str:
        return f"Test {self.words}" + (" (%)" if self.percent else "")

    @property
    def digits(self) -> int:
        return 2 if self.percent else 3

    def scaled(self, value: float) -> float:
        return 100 * value if self.percent else value

    def plain(self, value: float | None, digits: int | None = None, sign: bool = False) -> str:
        """The number alone, without its unit."""
        if not is_finite(value):
            return NONE
        digits = self.digits if digits is None else digits
        text = f"{self.scaled(value):{'+' if sign else ''}.{digits}f}"
        if not text.strip("+-0."):  # neither "−0.00" nor "+0.00"
            text = text.lstrip("+-")
        return text.replace("-", "−")

    def spread(self, mean: float | None, std: float | None) -> str:
        """mean ± std."""
        if not is_finite(mean):
            return NONE
        return self.plain(mean) + (f" ± {self.plain(std)}" if is_finite(std) else "")

    def difference(self, value: float, low: float | None, high: float | None) -> str:
        """Positive is better, whatever the metric: said so where that is not plain."""
        digits = self.fitting(low, high)
        unit = " points" if self.percent else ""
        if self.about.higher_is_better:
            return self.plain(value, digits, sign=True) + unit
        word = "higher" if value < 0 else "lower"
        return f"{self.words} {self.plain(abs(value), digits)}{unit} {word}"

    def between(self, low: float, high: float) -> str:
        """An interval beside such a difference: 0.5 to 2.0 lower; 0.3 higher to 1.2 lower."""
        if self.about.higher_is_better:
            return self.interval(low, high)
        digits = self.fitting(low, high)
        ends = [self.plain(abs(each), digits) for each in (low, high)]
        if low < 0 < high:
            return f"{ends[0]} higher to {ends[1]} lower"
        return f"{ends[0]} to {ends[1]} lower" if low >= 0 else f"{ends[1]} to {ends[0]} higher"

    def interval(self, low: float | None, high: float | None) -> str:
        digits = self.fitting(low, high)
        return f"{self.plain(low, digits)} to {self.plain(high, digits)}"

    def fitting(self, low: float | None, high: float | None) -> int:
        """Digits after the point: no more than the width of the interval gives meaning to, and so
        many that an end beside zero is not taken for zero, which would belie the verdict."""
        if not (is_finite(low) and is_finite(high)) or self.scaled(high - low) <= 0:
            return self.digits
        first = -math.floor(math.log10(self.scaled(high - low)))  # the place of its first digit
        digits = min(max(first + 1, 1), 6) if self.percent else min(max(first + 1, 2), 6)
        ends = [abs(self.scaled(end)) for end in (low, high) if end]
        for more in (digits, digits + 1):
            if all(round(end, more) for end in ends):
                return more
        return digits
