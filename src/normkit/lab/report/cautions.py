"""What a reader has to know before believing the numbers."""

from __future__ import annotations

from normkit.lab.report.answer import MANY, at
from normkit.lab.report.environments import environments
from normkit.lab.report.scores import Board, Scores
from normkit.lab.report.words import counted, listed


def cautions(board: Board) -> list[str]:
    """Sentences; none where nothing has been run."""
    experiment, counts = board.experiment, board.counts
    found = []
    if counts["missing"] and counts["finished"]:
        found.append(
            f"{counts['missing']:,} of {counted(counts['all'], 'run')} are not finished: this is "
            "what can be said without them."
        )
    for name in board.names():
        lost = [scores for scores in board if scores.variant.name == name and scores.diverged]
        if lost:
            places = "; ".join(map(_where, lost[:MANY]))
            more = f"; and {len(lost) - MANY} more cells" if len(lost) > MANY else ""
            found.append(f"{name} diverged: {places}{more}. Such seeds are counted, not compared.")
    if len(experiment.seeds) < 5:
        found.append(
            f"{counted(len(experiment.seeds), 'seed')}: too few to show small differences."
        )
    if len(environments(board.all_results())) > 1:
        found.append(
            "The runs were not all made with the same versions and hardware: times may differ for "
            "that reason. See Versions and hardware."
        )
    return found


def _where(scores: Scores) -> str:
    seeds = f"{'seed' if len(scores.diverged) == 1 else 'seeds'} {listed(scores.diverged)}"
    if len(scores.diverged) == len(scores.runs) > 1:
        seeds = "every seed"
    return f"{seeds} {at(scores.variant.cell)}".removesuffix(" at ")
