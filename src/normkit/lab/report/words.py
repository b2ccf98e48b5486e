"""How numbers, scores, settings and points of the grid are written."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeGuard

from normkit.core.messages import counted as counted  # templates get this module
from normkit.lab.experiment import Cell
from normkit.lab.results import higher_is_better

NONE = "–"

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


def known(value: float | None) -> TypeGuard[float]:
    """Whether a number says anything: neither None nor NaN nor infinite."""
    return value is not None and math.isfinite(value)


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
    return ", ".join(_said(path, value) for path, value in cell)


def _said(path: str, value: Any) -> str:
    if path == "train.worker_batch" and value is None:
        return "the whole batch on one worker"
    pattern = AXES[path][1] if path in AXES else axis_words(path) + " {}"
    text = value_words(value)
    return pattern.replace("{}", text) if text != "1" else _single(pattern)


def _single(pattern: str) -> str:
    head, _, tail = pattern.partition("{} ")
    first, _, rest = tail.partition(" ")
    return f"{head}1 {first.removesuffix('s')} {rest}".strip() if tail else pattern.format(1)


def at(cell: Cell) -> str:
    """at 2 samples a worker; for resnet18."""
    named = any(isinstance(value, str) for _, value in cell)
    return f"{'for' if named else 'at'} {cell_words(cell)}"


def listed(names: Iterable[object], most: int = 8) -> str:
    """a, b and c; with very many names the last ones are counted."""
    texts = [str(name) for name in names]
    if len(texts) > most:
        texts = [*texts[: most - 1], f"{len(texts) - most + 1} more"]
    return texts[0] if len(texts) == 1 else " and ".join([", ".join(texts[:-1]), *texts[-1:]])


def rough(count: int) -> int:
    """A guess, not more exact than it is.

    >>> rough(12), rough(42), rough(193)
    (12, 45, 200)
    """
    step = 1 if count <= 20 else 5 if count < 100 else 10 ** (len(str(count)) - 2)
    return -(-count // step) * step


def duration(seconds: float | None) -> str:
    """
    >>> duration(0.25), duration(42.1), duration(3750)
    ('0.25 s', '42 s', '1 h 2 min')
    """
    if seconds is None or not known(seconds):
        return NONE
    if seconds < 9.95:
        return f"{seconds:.2g} s"
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, rest = divmod(minutes, 60)
    return f"{hours:,} h" + (f" {rest} min" if rest and hours < 24 else "")


def size(count: float | None) -> str:
    """Bytes, in units of 1024."""
    if count is None or not known(count):
        return NONE
    for unit in ("B", "KiB", "MiB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} GiB"


def probability(value: float | None) -> str:
    """A p-value; small ones are not more exact than they are."""
    if value is None or not known(value):
        return NONE
    if value < 0.001:
        return "< 0.001"
    return f"{value:.3f}" if value < 0.1 else f"{value:.2f}"


def three(value: float | None) -> str:
    """A number with three digits."""
    if value is None or not known(value):
        return NONE
    return f"{value:.3g}".replace("-", "−") if abs(value) < 1000 else f"{value:,.0f}"


@dataclass(frozen=True)
class Metric:
    """How a metric is written: accuracy and error in percent, as papers print them."""

    name: str

    @property
    def percent(self) -> bool:
        return self.name != "loss"

    @property
    def words(self) -> str:
        return self.name.replace("top5_", "top-5 ")

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
        if not known(value):
            return NONE
        digits = self.digits if digits is None else digits
        text = f"{self.scaled(value):{'+' if sign else ''}.{digits}f}"
        if not text.strip("+-0."):  # neither "−0.00" nor "+0.00"
            text = text.lstrip("+-")
        return text.replace("-", "−")

    def spread(self, mean: float | None, std: float | None) -> str:
        """mean ± std."""
        if not known(mean):
            return NONE
        return self.plain(mean) + (f" ± {self.plain(std)}" if known(std) else "")

    def score(self, mean: float | None, std: float | None = None) -> str:
        """mean ± std, with the unit."""
        return self.spread(mean, std) + (" %" if self.percent and known(mean) else "")

    def difference(self, value: float, low: float | None, high: float | None) -> str:
        """Positive is better, whatever the metric: said so where that is not plain."""
        digits = self.fitting(low, high)
        unit = " points" if self.percent else ""
        if higher_is_better(self.name):
            return self.plain(value, digits, sign=True) + unit
        word = "higher" if value < 0 else "lower"
        return f"{self.words} {self.plain(abs(value), digits)}{unit} {word}"

    def between(self, low: float, high: float) -> str:
        """An interval beside such a difference: 0.5 to 2.0 lower; 0.3 higher to 1.2 lower."""
        if higher_is_better(self.name):
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
        """Digits after the point: no more than the width of the interval gives meaning to."""
        if not (known(low) and known(high)) or self.scaled(high - low) <= 0:
            return self.digits
        first = -math.floor(math.log10(self.scaled(high - low)))  # the place of its first digit
        return min(max(first + 1, 1), 6) if self.percent else min(max(first + 1, 2), 6)
