"""The answer in plain sentences: what was shown, what was not, and what to beware of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from normkit.core.messages import counted
from normkit.lab.experiment import Cell
from normkit.lab.report.scores import DIVERGED, ORDER, Board, Scores, ranked, shown
from normkit.lab.report.tables import environments
from normkit.lab.report.words import Metric, at, known, listed, rough
from normkit.lab.results import Comparison
from normkit.lab.statistics.paired_tests import ALPHA

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


def lead(board: Board, comparisons: Sequence[Comparison], metric: Metric) -> tuple[str, str]:
    """The sentence, and the verdict that gives the page its colour."""
    base = board.experiment.baseline
    if not board.counts["finished"]:
        return "Nothing has been run yet, so there is no answer yet.", "not shown"
    if not comparisons:
        return f"There is nothing to compare with {base} yet.", "not shown"
    if not any(c.pairs for c in comparisons) and any(c.baseline_diverged for c in comparisons):
        return _without_baseline(base, comparisons), DIVERGED
    best = ranked(comparisons)[0]
    if best.verdict == "better" or len(comparisons) == 1:
        return sentence(best, metric, board, where=True) + _others(best, comparisons), best.verdict
    verdicts = {c.verdict for c in comparisons}
    if verdicts == {"equivalent"}:
        return f"Everything compared is equivalent to {base}.", "equivalent"
    if verdicts == {"worse"}:
        return f"Everything compared is worse than {base}.", "worse"
    if not any(c.pairs for c in comparisons):
        return f"No seed was finished by {base} and by another variant.", "not shown"
    near = _nearest(comparisons, metric, board)
    return f"Nothing was shown to be better than {base}.{near}", "not shown"


def _without_baseline(base: str, comparisons: Sequence[Comparison]) -> str:
    """Which variants can be trained at all is an answer, too."""
    lost = {c.variant for c in comparisons if c.diverged}
    held = [name for name in dict.fromkeys(c.variant for c in comparisons) if name not in lost]
    said = f"{base} diverged, and nothing can be compared with it."
    return f"{said} Without a divergence: {listed(held)}." if held else said


def _others(best: Comparison, comparisons: Sequence[Comparison]) -> str:
    others = [c for c in ranked(comparisons) if c.verdict == "better" and c is not best]
    if not others:
        return ""
    elsewhere = any(c.cell != best.cell for c in others)
    names = [f"{c.variant} {at(c.cell)}" if elsewhere and c.cell else c.variant for c in others]
    return f" Also better: {listed(names, most=3)}."


def _nearest(comparisons: Sequence[Comparison], metric: Metric, board: Board) -> str:
    """What would be better if it were all that had been asked: Holm's correction is in its way."""
    near = [c for c in comparisons if c.verdict == "not shown" and c.p_better <= ALPHA]
    if not near:
        return ""
    c = min(near, key=lambda each: each.p_better)
    place = f" {at(c.cell)}" if c.cell else ""
    return f" Nearest to it is {c.variant}{place}: {numbers(c, metric, board)}."


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
            text += f", 95 % interval {metric.between(c.low, c.high)}"
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
    if c.verdict != "not shown":
        return ""
    if c.pairs == 1:
        return "; a verdict needs at least 2, better 5"
    if not c.more_seeds:
        return ""
    return f"; about {counted(rough(c.more_seeds), 'more seed')} would decide"


def _losses(c: Comparison, board: Board) -> str:
    said = ""
    if c.diverged:
        said = f"; it diverged at {_share(c.diverged, c.variant, c.cell, board)}"
    if c.baseline_diverged and not c.pairs:  # else it would stand in every line
        lost = _share(c.baseline_diverged, c.baseline, c.cell, board)
        said += f"; {c.baseline} diverged at {lost}"
    return said


def _share(lost: int, name: str, cell: Cell, board: Board) -> str:
    scores = board.get(name, cell)
    return f"{lost} of {counted(len(scores.results), 'seed')}" if scores else counted(lost, "seed")


def cautions(
    board: Board,
    comparisons: Iterable[Comparison] = (),
    failures: Mapping[str, str] | None = None,
) -> list[str]:
    """Sentences; none where nothing has been run. ``failures`` says, by run id, why one failed."""
    experiment, counts = board.experiment, board.counts
    found = []
    if counts["missing"] and counts["finished"]:
        failed = len(failed_runs(board, failures or {}))
        state = "failed" if failed == counts["missing"] else "are not finished"
        why = f", {failed:,} of them failed" if 0 < failed < counts["missing"] else ""
        found.append(
            f"{counts['missing']:,} of {counted(counts['all'], 'run')} {state}{why}: "
            "this is what can be said without them."
        )
    for name in board.names():
        lost = [scores for scores in board if scores.variant.name == name and scores.diverged]
        if lost:
            places = "; ".join(map(_where, lost[:MANY]))
            more = f"; and {len(lost) - MANY} more cells" if len(lost) > MANY else ""
            found.append(f"{name} diverged: {places}{more}. Such seeds are counted, not compared.")
    if len(experiment.seeds) == 1:
        found.append(
            "1 seed: nothing can be shown with it, however large a difference looks. Try 5 or "
            "more; what has been trained is kept."
        )
    elif len(experiment.seeds) < 5:
        found.append(
            f"{counted(len(experiment.seeds), 'seed')}: too few to show small differences."
        )
    narrow = dict.fromkeys(c.variant for c in comparisons if _is_narrow(c, experiment.equivalence))
    if narrow:
        found.append(
            f"{listed(narrow)}: decided narrowly. The verdict is that of a one-sided t-test at "
            "5 %; the 95 % interval has two sides and leans as the seeds do, and does not exclude "
            "the opposite yet."
        )
    if len(environments(board.all_results())) > 1:
        found.append(
            "The runs were not all made with the same versions and hardware: times may differ for "
            "that reason. See Versions and hardware."
        )
    return found


def failed_runs(board: Board, failures: Mapping[str, str]) -> set[str]:
    """Runs of this experiment that failed, and for which no later try left a result."""
    missing = {scores.runs[seed].id for scores in board for seed in scores.missing}
    return missing & failures.keys()


def _is_narrow(found: Comparison, margin: float) -> bool:
    """Whether the interval leaves open what the test has decided."""
    return (
        (found.verdict == "better" and found.low <= 0)
        or (found.verdict == "worse" and found.high >= 0)
        or (found.verdict == "equivalent" and max(-found.low, found.high) > margin)
    )


def _where(scores: Scores) -> str:
    seeds = f"{'seed' if len(scores.diverged) == 1 else 'seeds'} {listed(scores.diverged)}"
    if len(scores.diverged) == len(scores.runs) > 1:
        seeds = "every seed"
    return f"{seeds} {at(scores.variant.cell)}".removesuffix(" at ")
