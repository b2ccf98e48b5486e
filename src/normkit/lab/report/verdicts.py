"""The verdict table, its small pictures of intervals, and the map of verdicts over the cells."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from normkit.core.messages import counted
from normkit.lab.experiment import Cell
from normkit.lab.report.figures import Look
from normkit.lab.report.scores import Arrangement, Board, Scores, arrange, axes_of, ranked, shown
from normkit.lab.report.words import Metric, axis_words, cell_words, known, rough, value_words
from normkit.lab.results import Comparison

BASELINE = "baseline"
SYMBOLS = {"better": "▲", "worse": "▼", "equivalent": "=", "not shown": "?", "diverged": "✕"}


@dataclass(frozen=True)
class Verdict:
    """A row of the table. The baseline has a row too, without a comparison."""

    look: Look
    place: tuple[tuple[Any, str], ...]  # value and word for each axis
    verdict: str
    scores: Scores
    comparison: Comparison | None
    picture: ForestRow | None

    @property
    def more(self) -> str:
        c = self.comparison
        if c is None or c.verdict != "not shown":
            return ""
        if not c.pairs:
            if c.baseline_diverged:
                return f"{c.baseline} diverged"
            return "" if c.diverged else "no seed finished by both"
        if c.pairs == 1:
            return "needs 2 seeds"
        return f"≈ {counted(rough(c.more_seeds), 'more seed')}" if c.more_seeds else ""


def axis_heads(board: Board) -> list[str]:
    return [axis_words(path) for path in axes_of(board.experiment.cells())]


def rows(
    board: Board, comparisons: Sequence[Comparison], looks: Mapping[str, Look]
) -> list[Verdict]:
    """Cell by cell: the baseline, then the others from the best to the worst."""
    experiment = board.experiment
    metric = Metric(experiment.metric)
    axes = list(axes_of(experiment.cells()))
    differences = {
        (c.variant, c.cell): board.differences(scores)
        for c in comparisons
        if (scores := board.get(c.variant, c.cell)) is not None
    }
    to = forest_scale(
        (c.low, c.high, c.difference, *differences.get((c.variant, c.cell), {}).values())
        for c in comparisons
    )
    made = []
    for cell in experiment.cells():
        place = tuple((dict(cell).get(axis), value_words(dict(cell).get(axis))) for axis in axes)
        base = board.baseline(cell)
        if base is not None:
            look = looks[base.variant.name]
            made.append(Verdict(look, place, BASELINE, base, None, None))
        for c in ranked([c for c in comparisons if c.cell == cell]):
            scores = board.get(c.variant, cell)
            if scores is not None:
                seeds = differences[c.variant, cell]
                picture = forest_row(c, seeds, to, experiment.equivalence, metric)
                made.append(Verdict(looks[c.variant], place, shown(c), scores, c, picture))
    return made


@dataclass(frozen=True)
class Map:
    """Verdicts over the cells: a line for each variant, a column for each value of an axis."""

    arrangement: Arrangement
    groups: tuple[tuple[str, tuple[tuple[Look, tuple[Comparison | None, ...]], ...]], ...]

    @property
    def single(self) -> bool:
        """Whether every group has one line: then its title can stand before that."""
        return all(title and len(lines) == 1 for title, lines in self.groups)


def verdict_map(
    board: Board, comparisons: Sequence[Comparison], looks: Mapping[str, Look]
) -> Map | None:
    """None where there is but one cell, which the table shows better."""
    cells = board.experiment.cells()
    if len(cells) < 2 or not any(c.pairs for c in comparisons):
        return None
    by_place = {(c.variant, c.cell): c for c in comparisons}
    arrangement = arrange(cells)

    def line(name: str, group: Cell) -> tuple[Comparison | None, ...]:
        found = (arrangement.cell(group, column) for column in arrangement.columns)
        return tuple(None if cell is None else by_place.get((name, cell)) for cell in found)

    names = list(dict.fromkeys(c.variant for c in comparisons))
    groups = []
    for group in arrangement.groups:
        lines = [(looks[name], line(name, group)) for name in names]
        kept = tuple((look, found) for look, found in lines if any(c is not None for c in found))
        if kept:
            groups.append((cell_words(group), kept))
    return Map(arrangement, tuple(groups))


def strengths(comparisons: Sequence[Comparison]) -> Callable[[Comparison], float]:
    """How strongly the map colours a difference, from 0 to 1: relative to the largest one."""
    sizes = [abs(c.difference) for c in comparisons if known(c.difference)]
    most = max(sizes, default=0.0)

    def strength(c: Comparison) -> float:
        certain = c.verdict in ("better", "worse") and known(c.difference)
        return round(abs(c.difference) / most, 2) if certain and most else 0.0

    return strength


WIDTH, HEIGHT, EDGE = 168, 26, 6
ARROWS = (
    f"M5 {HEIGHT // 2 - 5}L0 {HEIGHT // 2}L5 {HEIGHT // 2 + 5}z",
    f"M{WIDTH - 5} {HEIGHT // 2 - 5}L{WIDTH} {HEIGHT // 2}L{WIDTH - 5} {HEIGHT // 2 + 5}z",
)
FAR = 3  # times the usual reach of a row: what lies beyond is cut off, with an arrow


@dataclass(frozen=True)
class ForestScale:
    """From differences to pixels, the same for all rows of a table; zero is always on it."""

    low: float
    high: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(EDGE + (WIDTH - 2 * EDGE) * min(max(share, 0.0), 1.0), 1)

    def shows(self, value: float) -> bool:
        return self.low <= value <= self.high


def forest_scale(rows: Iterable[Iterable[float | None]]) -> ForestScale:
    """Room for all rows, but for those that are so far out that the others would shrink to dots."""
    found = [known_ones for row in rows if (known_ones := [v for v in row if known(v)])]
    reach = FAR * statistics.median(max(map(abs, row)) for row in found) if found else 0.0
    values = [0.0, *(v for row in found for v in row)]
    low, high = min(values), max(values)
    if reach:
        low, high = max(low, -reach), min(high, reach)
    room = 0.04 * (high - low) or 1.0
    return ForestScale(low - room, high + room)


@dataclass(frozen=True)
class ForestRow:
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


def forest_row(
    comparison: Comparison,
    seeds: Mapping[int, float],
    to: ForestScale,
    margin: float,
    metric: Metric,
) -> ForestRow:
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
    return ForestRow(
        zero=to(0.0),
        margin=(left, round(to(margin) - left, 1)),
        interval=(to(comparison.low), to(comparison.high)) if bounded else None,
        mean=to(comparison.difference) if to.shows(comparison.difference) else None,
        dots=dots,
        label=said or "no seed was finished by both",
        beyond=arrows,
    )
