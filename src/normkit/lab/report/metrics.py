"""How scores and differences are written."""

from __future__ import annotations

import math
from dataclasses import dataclass

from normkit.lab.report.words import NONE, known
from normkit.lab.results import higher_is_better


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
