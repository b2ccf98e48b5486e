"""What a reader has to know before believing the numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from normkit.core.messages import counted
from normkit.lab.report.answer import MANY
from normkit.lab.report.environments import environments
from normkit.lab.report.scores import Board, Scores
from normkit.lab.report.sentences import at
from normkit.lab.report.words import listed
from normkit.lab.results import Comparison


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
