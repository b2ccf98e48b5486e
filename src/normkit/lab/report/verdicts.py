"""The verdict table, and the map of verdicts over the cells."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from normkit.core.messages import counted
from normkit.lab.experiment import Cell
from normkit.lab.report.figures import VariantStyle
from normkit.lab.report.scores import (
    Arrangement,
    GridValues,
    Scoreboard,
    Scores,
    arrange,
    ranked,
    verdict_of,
)
from normkit.lab.report.words import axis_words, cell_words
from normkit.lab.results import COLLAPSED, DIVERGED, FAILED, Comparison
from normkit.lab.statistics import UNSTABLE
from normkit.reporting.charts import ForestRow, forest_row, forest_scale
from normkit.reporting.text import is_finite, rough

BASELINE = "baseline"
NAMED = 12  # seeds whose differences a picture says one by one
DOTS = 3000  # of all pictures of a table; with more of them, only the chart below has dots


class VerdictLook(NamedTuple):
    """How a verdict is told from others at a glance."""

    tone: str  # its class on the page
    symbol: str  # in the map
    style: str  # in a terminal


LOOKS = {
    "better": VerdictLook("fine", "▲", "bold green"),
    "worse": VerdictLook("serious", "▼", "bold red"),
    "equivalent": VerdictLook("note", "=", "cyan"),
    "not shown": VerdictLook("unsure", "?", "dim"),
    "unstable": VerdictLook("serious", "!", "bold red"),
    **dict.fromkeys((DIVERGED, COLLAPSED, FAILED), VerdictLook("serious", "✕", "bold red")),
    BASELINE: VerdictLook("unsure", "?", "dim"),
}


@dataclass(frozen=True)
class VerdictRow:
    """A row of the table. The baseline has a row too, without a comparison."""

    style: VariantStyle
    grid_values: GridValues
    verdict: str
    scores: Scores
    comparison: Comparison | None = None
    forest: ForestRow | None = None

    @property
    def more(self) -> str:
        """What a verdict needs that is not shown."""
        c = self.comparison
        if c is not None and c.verdict == UNSTABLE and c.pairs:
            return "numbers of the survivors"
        if c is None or c.verdict != "not shown":
            return ""
        if not c.pairs:
            if c.baseline_lost:
                word = next(word for word, count in c.baseline_losses if count)
                return f"{c.baseline} {word}"
            return "" if c.lost else "no seed finished by both"
        if c.pairs == 1:
            return "needs 2 seeds"
        return f"≈ {counted(rough(c.more_seeds), 'more seed')}" if c.more_seeds else ""


def axis_heads(board: Scoreboard) -> list[str]:
    return [axis_words(path) for path in board.axes]


def verdict_rows(board: Scoreboard, comparisons: Sequence[Comparison]) -> list[VerdictRow]:
    """Cell by cell: the baseline, then the others from the best to the worst."""
    differences = {
        (c.variant, c.cell): board.differences(scores)
        for c in comparisons
        if (scores := board.get(c.variant, c.cell)) is not None
    }
    scale = forest_scale(
        (c.low, c.high, c.difference, *differences.get((c.variant, c.cell), {}).values())
        for c in comparisons
    )
    crowded = sum(map(len, differences.values())) > DOTS
    rows = []
    for cell in board.cells:
        grid_values = board.grid_values(cell)
        base = board.baseline(cell)
        if base is not None:
            rows.append(VerdictRow(board.styles[base.variant.name], grid_values, BASELINE, base))
        for c in ranked([c for c in comparisons if c.cell == cell]):
            scores = board.get(c.variant, cell)
            if scores is None:
                continue
            by_seed = differences[c.variant, cell]
            forest = forest_row(
                [] if crowded else list(by_seed.values()),
                c.difference,
                (c.low, c.high),
                scale,
                margin=board.experiment.equivalence,
                label=_seeds_label(by_seed, board),
            )
            style = board.styles[c.variant]
            rows.append(VerdictRow(style, grid_values, verdict_of(c), scores, c, forest))
    return rows


def _seeds_label(by_seed: Mapping[int, float], board: Scoreboard) -> str:
    def plain(value: float) -> str:
        return board.metric.plain(value, sign=True)

    if len(by_seed) > NAMED:
        ends = f"from {plain(min(by_seed.values()))} to {plain(max(by_seed.values()))}"
        return f"{len(by_seed)} seeds, {ends}"
    seeds = (f"seed {seed}: {plain(value)}" for seed, value in by_seed.items())
    return ", ".join(seeds) or "no seed was finished by both"


@dataclass(frozen=True)
class VerdictMap:
    """Verdicts over the cells: a line for each variant, a column for each value of an axis."""

    arrangement: Arrangement
    groups: tuple[tuple[str, tuple[tuple[VariantStyle, tuple[Comparison | None, ...]], ...]], ...]

    @property
    def single(self) -> bool:
        """Whether every group has one line: then its title can stand before that."""
        return all(title and len(lines) == 1 for title, lines in self.groups)


def verdict_map(board: Scoreboard, comparisons: Sequence[Comparison]) -> VerdictMap | None:
    """None where there is but one cell, which the table shows better."""
    if len(board.cells) < 2 or not any(c.pairs for c in comparisons):
        return None
    by_cell = {(c.variant, c.cell): c for c in comparisons}
    arrangement = arrange(board.cells)

    def line(name: str, group: Cell) -> tuple[Comparison | None, ...]:
        cells = (arrangement.cell(group, column) for column in arrangement.columns)
        return tuple(None if cell is None else by_cell.get((name, cell)) for cell in cells)

    names = list(dict.fromkeys(c.variant for c in comparisons))
    groups = []
    for group in arrangement.groups:
        lines = ((board.styles[name], line(name, group)) for name in names)
        kept = tuple((style, each) for style, each in lines if any(c is not None for c in each))
        if kept:
            groups.append((cell_words(group), kept))
    return VerdictMap(arrangement, tuple(groups))


def strengths(comparisons: Sequence[Comparison]) -> Callable[[Comparison], float]:
    """How strongly the map colours a difference, from 0 to 1: relative to the largest one."""
    most = max((abs(c.difference) for c in comparisons if is_finite(c.difference)), default=0.0)

    def strength(c: Comparison) -> float:
        certain = c.verdict in ("better", "worse") and is_finite(c.difference)
        return round(abs(c.difference) / most, 2) if certain and most else 0.0

    return strength
