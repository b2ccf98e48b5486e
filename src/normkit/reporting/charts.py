"""Charts as SVG that takes its colours from the page: here is the geometry, components.html draws.

Nothing here becomes markup by itself: texts are escaped where the template writes them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from normkit.reporting.text import is_finite, number

WIDTH, HEIGHT = 440, 250  # of a line chart; pages scale it
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 14, 40
LEAST = 0.01  # what a logarithmic axis begins with
SHADES = 20  # of a heat map


class Series(NamedTuple):
    """One line: its name, and a value for each layer; None where there is none."""

    name: str
    values: Sequence[float | None]


class Point(NamedTuple):
    x: float
    y: float
    text: str  # when one points at it


@dataclass(frozen=True)
class Line:
    path: str  # of SVG
    dots: tuple[Point, ...]
    crosses: tuple[Point, ...]  # values that are not finite, at the top


@dataclass(frozen=True)
class LineChart:
    label: str
    lines: tuple[Line, ...]
    rows: tuple[tuple[float, str], ...]  # heights of the grid, with their numbers
    columns: tuple[tuple[float, str], ...]
    bounds: tuple[tuple[float, str], ...]
    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT
    right: int = WIDTH - RIGHT
    bottom: int = HEIGHT - BOTTOM


def line_chart(
    series: Sequence[Series],
    names: Sequence[str],
    *,
    label: str,
    logarithmic: bool = False,
    bounds: Sequence[float] = (),
) -> LineChart:
    """Values over the layers in the order in which they run, for at most two series."""
    values = [v for s in series for v in s.values if is_finite(v)]
    top = max([*values, *bounds, LEAST * 10 if logarithmic else 1e-9])
    ticks = _decades(top) if logarithmic else _round_steps(top)
    top = max(top, ticks[-1])

    def x(i: int) -> float:
        share = 0.5 if len(names) == 1 else i / (len(names) - 1)
        return round(LEFT + (WIDTH - LEFT - RIGHT) * share, 1)

    def y(value: float) -> float:
        share = value / top
        if logarithmic:
            share = math.log10(max(value, LEAST) / LEAST) / math.log10(top / LEAST)
        return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * _clipped(share), 1)

    lines = []
    for each in series:
        path, dots, crosses, pen = [], [], [], "M"
        for i, value in enumerate(each.values):
            if value is None:
                pen = "M"  # a gap
                continue
            text = f"{names[i]}: {each.name} {number(value)}"
            if math.isfinite(value):
                dots.append(Point(x(i), y(value), text))
                path.append(f"{pen}{x(i)} {y(value)}")
                pen = "L"
            else:
                crosses.append(Point(x(i), TOP, text))
                pen = "M"
        lines.append(Line("".join(path), tuple(dots), tuple(crosses)))
    return LineChart(
        label,
        tuple(lines),
        tuple((y(tick), number(tick)) for tick in ticks),
        tuple((x(i), str(i + 1)) for i in _some(len(names))),
        tuple((y(bound), number(bound)) for bound in bounds),
    )


def _decades(top: float) -> list[float]:
    """Powers of ten, not too many."""
    first, last = round(math.log10(LEAST)), math.ceil(math.log10(top) - 1e-9)
    step = max(1, math.ceil((last - first) / 6))
    return [10.0**k for k in range(first, last + step, step)]


def _round_steps(top: float) -> list[float]:
    """About five round numbers from 0 to above the highest value."""
    rough = top / 4
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * k for k in (1, 2, 2.5, 5, 10) if size * k >= rough)
    return [step * k for k in range(math.ceil(top / step - 1e-9) + 1)]


def _some(count: int) -> list[int]:
    """About eight of the layers, the first and the last among them."""
    step = max(1, math.ceil((count - 1) / 7))
    chosen = list(range(0, count, step))
    if count and chosen[-1] != count - 1:
        if count - 1 - chosen[-1] < step / 2 and len(chosen) > 1:
            chosen.pop()
        chosen.append(count - 1)
    return chosen


def _clipped(share: float) -> float:
    return min(max(share, 0.0), 1.0)


@dataclass(frozen=True)
class HeatMap:
    """Cosines between samples: the stronger the colour the more alike, another if below 0."""

    label: str
    size: int
    shades: tuple[tuple[str, float, str], ...]  # class, opacity and path of all cells alike


def heat_map(cosines: Sequence[Sequence[float]], label: str) -> HeatMap:
    shades: dict[tuple[str, int], list[str]] = {}
    for i, row in enumerate(cosines):
        for j, value in enumerate(row):
            level = round(min(abs(value), 1.0) * SHADES) if math.isfinite(value) else 0
            if level:
                kind = "positive" if value > 0 else "negative"
                shades.setdefault((kind, level), []).append(f"M{j} {i}h1v1h-1z")
    return HeatMap(
        label,
        len(cosines),
        tuple((kind, k / SHADES, "".join(cells)) for (kind, k), cells in sorted(shades.items())),
    )


class Bar(NamedTuple):
    name: str
    share: float  # of the track
    bad: bool
    text: str


@dataclass(frozen=True)
class BarList:
    """A bar for each layer: readable at any width."""

    bars: tuple[Bar, ...]
    mark: float | None  # where on the track the bound is


def bar_list(
    values: Mapping[str, float],
    *,
    bound: float | None = None,
    below: bool = False,
    logarithmic: bool = False,
    show: Callable[[float], str] = number,
) -> BarList:
    """``below``: small values are the bad ones."""
    finite = [value for value in values.values() if math.isfinite(value)]
    most = max([*finite, *([] if bound is None else [bound]), 1e-30])

    def share(value: float) -> float:
        if logarithmic:
            return _clipped(math.log10(max(value, 1.0)) / math.log10(max(most, 10.0)))
        return _clipped(value / most)

    bars = []
    for name, value in values.items():
        bad = bound is not None and (value < bound if below else not value <= bound)
        bars.append(Bar(name, share(value) if math.isfinite(value) else 1.0, bad, show(value)))
    return BarList(tuple(bars), None if bound is None else share(bound))


FOREST_WIDTH, FOREST_HEIGHT, EDGE = 168, 26, 6
MIDDLE = FOREST_HEIGHT // 2
ARROWS = (
    f"M5 {MIDDLE - 5}L0 {MIDDLE}L5 {MIDDLE + 5}z",
    f"M{FOREST_WIDTH - 5} {MIDDLE - 5}L{FOREST_WIDTH} {MIDDLE}L{FOREST_WIDTH - 5} {MIDDLE + 5}z",
)
FAR = 3  # times the usual reach of a row: what lies beyond is cut off, with an arrow


@dataclass(frozen=True)
class ForestScale:
    """From differences to pixels, the same for all rows of a table; zero is always on it."""

    low: float
    high: float

    def __call__(self, value: float) -> float:
        share = _clipped((value - self.low) / (self.high - self.low))
        return round(EDGE + (FOREST_WIDTH - 2 * EDGE) * share, 1)

    def shows(self, value: float) -> bool:
        return self.low <= value <= self.high


@dataclass(frozen=True)
class ForestRow:
    """A row of a forest plot: every seed a dot, the interval a bar; all in pixels."""

    zero: float
    margin: tuple[float, float]  # where differences do not matter: its left end and its width
    interval: tuple[float, float] | None
    mean: float | None
    dots: str  # a path of points, each a line without length
    arrows: str  # a path: where it goes on
    label: str
    width: int = FOREST_WIDTH
    height: int = FOREST_HEIGHT


def forest_scale(rows: Iterable[Iterable[float | None]]) -> ForestScale:
    """Room for all rows, but for those that are so far out that the others would shrink to dots."""
    finite = [values for row in rows if (values := [v for v in row if is_finite(v)])]
    reach = FAR * statistics.median(max(map(abs, row)) for row in finite) if finite else 0.0
    values = [0.0, *(v for row in finite for v in row)]
    low, high = min(values), max(values)
    if reach:
        low, high = max(low, -reach), min(high, reach)
    room = 0.04 * (high - low) or 1.0
    return ForestScale(low - room, high + room)


def forest_row(
    differences: Sequence[float],
    mean: float,
    interval: tuple[float, float],
    scale: ForestScale,
    *,
    margin: float,
    label: str,
) -> ForestRow:
    left, (low, high) = scale(-margin), interval
    # the dots lie above and below the bar, in turns, so that equal ones are seen
    heights = (7, FOREST_HEIGHT - 7)
    dots = "".join(
        f"M{scale(v):g} {heights[i % 2]}h0" for i, v in enumerate(differences) if scale.shows(v)
    )
    ends = [v for v in (*differences, *interval) if is_finite(v)]
    beyond = any(v < scale.low for v in ends), any(v > scale.high for v in ends)
    return ForestRow(
        zero=scale(0.0),
        margin=(left, round(scale(margin) - left, 1)),
        interval=(scale(low), scale(high)) if is_finite(low) and is_finite(high) else None,
        mean=scale(mean) if scale.shows(mean) else None,
        dots=dots,
        arrows="".join(arrow for arrow, there in zip(ARROWS, beyond, strict=True) if there),
        label=label,
    )
