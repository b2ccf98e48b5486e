"""The answer in plain sentences: what was shown, what was not, and what to beware of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from normkit.core.messages import counted
from normkit.lab.experiment import Cell
from normkit.lab.report.leading import lead
from normkit.lab.report.metrics import Metric
from normkit.lab.report.ranking import DIVERGED, ORDER, ranked, shown
from normkit.lab.report.scores import Board
from normkit.lab.report.sentences import at, numbers, sentence
from normkit.lab.results import Comparison

MANY = 4  # cells; with more of them, verdicts are counted


@dataclass(frozen=True)
class Line:
    """A verdict, what it is about, and the numbers behind it."""

    verdict: str
    name: str
    numbers: str
    text: str  # all of it as a sentence


@dataclass(frozen=True)
class Tally:
    """A variant in many cells: in how many of them each verdict holds."""

    name: str
    counts: tuple[tuple[str, int], ...]  # verdicts in the order of ORDER
    cells: int


@dataclass(frozen=True)
class Answer:
    """The shortest answer; then one for every cell, or counts where there are many cells."""

    lead: str
    tone: str  # verdict of the lead
    groups: tuple[tuple[str, tuple[Line, ...]], ...] = ()
    tallies: tuple[Tally, ...] = ()

    def text(self) -> str:
        """For a terminal."""
        said = [self.lead]
        for title, lines in self.groups:
            said += ["", f"{title}:"] if title else [""]
            said += [f"  {line.text}" for line in lines]
        for tally in self.tallies:
            counts = ", ".join(f"{verdict} in {count}" for verdict, count in tally.counts if count)
            said.append(f"  {tally.name}: {counts} of {counted(tally.cells, 'cell')}")
        return "\n".join(said)


def answer(board: Board, comparisons: Sequence[Comparison]) -> Answer:
    metric = Metric(board.experiment.metric)
    first, tone = lead(board, comparisons, metric)
    if not board.counts["finished"] or not comparisons:
        return Answer(first, tone)
    if len(comparisons) == 1:
        return Answer(first, tone)  # the lead has said it
    cells = board.experiment.cells()
    if len(cells) > MANY:
        return Answer(first, tone, tallies=_tallies(comparisons))
    groups = []
    for cell in cells:
        here = ranked([c for c in comparisons if c.cell == cell])
        if here:
            groups.append((_title(cell), tuple(_line(c, metric, board) for c in here)))
    return Answer(first, tone, tuple(groups))


def _tallies(comparisons: Sequence[Comparison]) -> tuple[Tally, ...]:
    """Those that are better in most cells come first."""
    made = []
    there = {shown(c) for c in comparisons} | {ORDER[0]}  # that nothing is better has to be said
    columns = [verdict for verdict in (*ORDER, DIVERGED) if verdict in there]
    for name in dict.fromkeys(c.variant for c in comparisons):
        verdicts = [shown(c) for c in comparisons if c.variant == name]
        counts = tuple((verdict, verdicts.count(verdict)) for verdict in columns)
        made.append(Tally(name, counts, len(verdicts)))
    return tuple(sorted(made, key=_rank))


def _rank(tally: Tally) -> tuple[int, int]:
    counts = dict(tally.counts)
    return -counts["better"], counts.get("worse", 0)


def _line(c: Comparison, metric: Metric, board: Board) -> Line:
    return Line(shown(c), c.variant, numbers(c, metric, board), sentence(c, metric, board))


def _title(cell: Cell) -> str:
    words = at(cell)
    return words[:1].upper() + words[1:] if cell else ""
