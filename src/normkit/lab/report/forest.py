"""A row of a forest plot as a small picture: every seed a dot, the interval a bar."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from normkit.lab.report.metrics import Metric
from normkit.lab.report.words import known
from normkit.lab.results import Comparison

WIDTH, HEIGHT, EDGE = 168, 26, 6
ARROWS = (
    f"M5 {HEIGHT // 2 - 5}L0 {HEIGHT // 2}L5 {HEIGHT // 2 + 5}z",
    f"M{WIDTH - 5} {HEIGHT // 2 - 5}L{WIDTH} {HEIGHT // 2}L{WIDTH - 5} {HEIGHT // 2 + 5}z",
)
FAR = 3  # times the usual reach of a row: what lies beyond is cut off, with an arrow


@dataclass(frozen=True)
class Scale:
    """From differences to pixels, the same for all rows of a table; zero is always on it."""

    low: float
    high: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(EDGE + (WIDTH - 2 * EDGE) * min(max(share, 0.0), 1.0), 1)

    def shows(self, value: float) -> bool:
        return self.low <= value <= self.high


def scale(rows: Iterable[Iterable[float | None]]) -> Scale:
    """Room for all rows, but for those that are so far out that the others would shrink to dots."""
    found = [known_ones for row in rows if (known_ones := [v for v in row if known(v)])]
    reach = FAR * statistics.median(max(map(abs, row)) for row in found) if found else 0.0
    values = [0.0, *(v for row in found for v in row)]
    low, high = min(values), max(values)
    if reach:
        low, high = max(low, -reach), min(high, reach)
    room = 0.04 * (high - low) or 1.0
    return Scale(low - room, high + room)


@dataclass(frozen=True)
class Row:
    """What the template draws; all in pixels."""

    zero: float
    margin: tuple[float, float]  # where differences do not matter: its left end and its width
    interval: tuple[float, float] | None
    mean: float | None
    dots: str  # a path of points, each a line without length
    beyond: str  # a path: arrows where it goes on
    label: str

    width: int = WIDTH
    height: int = HEIGHT


def row(
    comparison: Comparison,
    seeds: Mapping[int, float],
    to: Scale,
    margin: float,
    metric: Metric,
) -> Row:
    bounded = known(comparison.low) and known(comparison.high)
    left = to(-margin)
    # the dots of seeds lie above and below the bar, in turns, so that equal ones are seen
    heights = (7, HEIGHT - 7)
    dots = "".join(
        f"M{to(v):g} {heights[i % 2]}h0" for i, v in enumerate(seeds.values()) if to.shows(v)
    )
    ends = [v for v in (*seeds.values(), comparison.low, comparison.high) if known(v)]
    arrows = ARROWS[0] * any(v < to.low for v in ends) + ARROWS[1] * any(v > to.high for v in ends)
    said = ", ".join(f"seed {s}: {metric.plain(v, sign=True)}" for s, v in seeds.items())
    return Row(
        zero=to(0.0),
        margin=(left, round(to(margin) - left, 1)),
        interval=(to(comparison.low), to(comparison.high)) if bounded else None,
        mean=to(comparison.difference) if to.shows(comparison.difference) else None,
        dots=dots,
        label=said or "no seed was finished by both",
        beyond=arrows,
    )
