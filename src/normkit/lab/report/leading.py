"""The shortest answer: the sentence with which a page begins."""

from __future__ import annotations

from collections.abc import Sequence

from normkit.lab.report.metrics import Metric
from normkit.lab.report.ranking import DIVERGED, ranked
from normkit.lab.report.scores import Board
from normkit.lab.report.sentences import at, numbers, sentence
from normkit.lab.report.words import listed
from normkit.lab.results import Comparison
from normkit.lab.statistics.spread import ALPHA


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
