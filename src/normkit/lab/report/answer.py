"""The answer in plain sentences: what was shown, what was not, and what to beware of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from normkit.lab.report.metrics import Metric
from normkit.lab.report.scores import Board
from normkit.lab.report.words import cell_words, counted, known
from normkit.lab.results import Comparison

ORDER = ("better", "worse", "equivalent", "not shown")
DIVERGED = "diverged"  # shown in place of a verdict where no seed was left to compare
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
    lead, tone = _lead(board, comparisons, metric)
    if not board.counts["finished"] or not comparisons:
        return Answer(lead, tone)
    if len(comparisons) == 1:
        return Answer(lead, tone)  # the lead has said it
    cells = board.experiment.cells()
    if len(cells) > MANY:
        return Answer(lead, tone, tallies=_tallies(comparisons))
    groups = []
    for cell in cells:
        here = ranked([c for c in comparisons if c.cell == cell])
        if here:
            groups.append((_title(cell), tuple(_line(c, metric, board) for c in here)))
    return Answer(lead, tone, tuple(groups))


def _tallies(comparisons: Sequence[Comparison]) -> tuple[Tally, ...]:
    """Those that are better in most cells come first."""
    made = []
    columns = [*ORDER, DIVERGED] if any(shown(c) == DIVERGED for c in comparisons) else ORDER
    for name in dict.fromkeys(c.variant for c in comparisons):
        verdicts = [shown(c) for c in comparisons if c.variant == name]
        counts = tuple((verdict, verdicts.count(verdict)) for verdict in columns)
        made.append(Tally(name, counts, len(verdicts)))
    return tuple(sorted(made, key=lambda tally: (-tally.counts[0][1], tally.counts[1][1])))


def ranked(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Better first, and within a verdict the largest difference first."""
    worst = float("-inf")
    return sorted(
        comparisons,
        key=lambda c: (
            ORDER.index(c.verdict) if c.verdict in ORDER else len(ORDER),
            -(c.difference if known(c.difference) else worst),
        ),
    )


def _lead(board: Board, comparisons: Sequence[Comparison], metric: Metric) -> tuple[str, str]:
    base = board.experiment.baseline
    if not board.counts["finished"]:
        return "Nothing has been run yet, so there is no answer yet.", "not shown"
    if not comparisons:
        return f"There is nothing to compare with {base} yet.", "not shown"
    best = ranked(comparisons)[0]
    several = len({c.variant for c in comparisons}) > 1 or len(comparisons) > 1
    if best.verdict == "better" or not several:
        return sentence(best, metric, board, where=True), best.verdict
    verdicts = {c.verdict for c in comparisons}
    if verdicts == {"equivalent"}:
        return f"Everything compared is equivalent to {base}.", "equivalent"
    if verdicts == {"worse"}:
        return f"Everything compared is worse than {base}.", "worse"
    if not any(c.pairs for c in comparisons):
        return f"No seed was finished by {base} and by another variant.", "not shown"
    return f"Nothing was shown to be better than {base}.", "not shown"


def sentence(c: Comparison, metric: Metric, board: Board, where: bool = False) -> str:
    """bcn is better than bn at 2 samples a worker: +3.1 points, 95 % interval 2.2 to 4.0, …"""
    place = f" {at(c.cell)}" if where and c.cell else ""
    return f"{_verb(c, metric, board.experiment.equivalence)}{place}: {numbers(c, metric, board)}."


def numbers(c: Comparison, metric: Metric, board: Board) -> str:
    """+3.1 points, 95 % interval 2.2 to 4.0, 5 seeds; and what is to be said about the seeds."""
    text = "no seed was finished by both"
    if c.pairs:
        text = metric.difference(c.difference, c.low, c.high)
        if known(c.low) and known(c.high):
            text += f", 95 % interval {metric.interval(c.low, c.high)}"
        text += f", {counted(c.pairs, 'seed')}"
    return f"{text}{_more(c)}{_losses(c, board)}"


def _verb(c: Comparison, metric: Metric, margin: float) -> str:
    if not c.pairs:
        return f"{c.variant} cannot be compared with {c.baseline}"
    if c.verdict in ("better", "worse"):
        return f"{c.variant} is {c.verdict} than {c.baseline}"
    if c.verdict == "equivalent":
        unit = " points" if metric.percent else ""
        bound = f"{metric.scaled(margin):g}{unit}"
        return f"{c.variant} is equivalent to {c.baseline}, within {bound}"
    return f"{c.variant} is not shown to differ from {c.baseline}"


def _more(c: Comparison) -> str:
    if c.verdict != "not shown" or not c.more_seeds:
        return ""
    return f"; about {counted(c.more_seeds, 'more seed')} would decide"


def _losses(c: Comparison, board: Board) -> str:
    if not c.diverged:
        return ""
    scores = board.get(c.variant, c.cell)
    of = f" of {len(scores.results)}" if scores is not None else ""
    return f"; it diverged at {c.diverged}{of} seeds"


def _line(c: Comparison, metric: Metric, board: Board) -> Line:
    return Line(shown(c), c.variant, numbers(c, metric, board), sentence(c, metric, board))


def shown(c: Comparison) -> str:
    """The verdict, or that there is none because the variant diverged."""
    return DIVERGED if c.diverged and not c.pairs else c.verdict


def at(cell: tuple[tuple[str, object], ...]) -> str:
    """at 2 samples a worker; for resnet18."""
    words = cell_words(cell)
    return f"for {words}" if cell and cell[0][0] in ("model.name", "data.name") else f"at {words}"


def _title(cell: tuple[tuple[str, object], ...]) -> str:
    words = at(cell)
    return words[:1].upper() + words[1:] if cell else ""
