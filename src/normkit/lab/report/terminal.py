"""The verdict table in a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from normkit.core.messages import counted
from normkit.lab.experiment import Experiment
from normkit.lab.report import verdicts
from normkit.lab.report.answer import answer, cautions
from normkit.lab.report.figures import looks
from normkit.lab.report.scores import Board
from normkit.lab.report.words import NONE, Metric, known, probability
from normkit.lab.results import Comparison, Result
from normkit.models import require

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

STYLES = {
    "better": "bold green",
    "worse": "bold red",
    "equivalent": "cyan",
    "not shown": "dim",
    "diverged": "bold red",
    "baseline": "dim",
}
WHAT = "The table of verdicts"
WIDE = 110  # columns


def print_verdicts(
    experiment: Experiment,
    results: Mapping[str, Result],
    comparisons: Sequence[Comparison],
    console: Console | None = None,
) -> None:
    """The answer, the table and what to beware of, on a terminal or any rich console."""
    text = require("rich.text", "cli", WHAT).Text
    if console is None:
        console = require("rich.console", "cli", WHAT).Console(highlight=False)
    board = Board(experiment, results)
    console.print(text(answer(board, comparisons).lead, style="bold"))
    if board.counts["finished"]:
        wide = console.width >= WIDE
        console.print(verdict_table(experiment, results, comparisons, wide=wide))
    for caution in cautions(board, comparisons):
        console.print(text(f"! {caution}", style="yellow"))


def verdict_table(
    experiment: Experiment,
    results: Mapping[str, Result],
    comparisons: Sequence[Comparison],
    *,
    wide: bool = True,
) -> Table:
    """A rich table; names are texts, so that nothing a user typed is read as markup.

    A narrow one has no p-values.
    """
    rich = require("rich.table", "cli", WHAT)
    text = require("rich.text", "cli", WHAT).Text
    box = require("rich.box", "cli", WHAT)
    board = Board(experiment, results)
    metric = Metric(experiment.metric)
    made: Table = rich.Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    axes = verdicts.axis_heads(board)
    for axis in axes:
        made.add_column(text(axis), justify="right", max_width=None if wide else 8)
    made.add_column("variant", overflow="fold")
    made.add_column(text(metric.title.lower()), justify="right", min_width=12)
    made.add_column("difference" if wide else "diff.", justify="right", no_wrap=True)
    made.add_column("95 % interval", justify="right", min_width=14)
    if wide:
        made.add_column("p (Holm)", justify="right", no_wrap=True)
    made.add_column("seeds", justify="right")
    made.add_column("verdict", min_width=11)
    last = None
    for row in verdicts.rows(board, comparisons, looks(board.names())):
        if last is not None and row.place != last:
            made.add_section()
        place = ["" if row.place == last else word for _, word in row.place]
        last = row.place
        cells = [*place, row.look.name, *_numbers(row, metric, wide)]
        style = "dim" if row.comparison is None else ""
        verdict = text(row.verdict, style=STYLES.get(row.verdict, ""))
        notes = [row.more] if row.more else []
        lost = len(row.scores.diverged)
        if lost:
            notes.append(counted(lost, "seed") if row.verdict == "diverged" else f"{lost} diverged")
        if notes:
            verdict.append(f" ({', '.join(notes)})", style="red" if lost else "dim")
        made.add_row(*(text(cell, style=style) for cell in cells), verdict)
    return made


def _numbers(row: verdicts.Verdict, metric: Metric, wide: bool) -> list[str]:
    c = row.comparison
    score = metric.spread(row.scores.mean, row.scores.std)
    if c is None:
        return [score, "", "", *([""] if wide else []), str(len(row.scores.by_seed))]
    better = known(c.difference) and c.difference >= 0
    p = probability(c.p_better_holm if better else c.p_worse_holm)
    interval = f"{metric.plain(c.low)} to {metric.plain(c.high)}" if known(c.low) else NONE
    difference = metric.plain(c.difference, sign=True)
    return [score, difference, interval, *([p] if wide else []), str(c.pairs)]
