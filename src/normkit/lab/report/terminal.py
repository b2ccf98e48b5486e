"""The verdict table in a terminal."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from normkit.core.messages import counted
from normkit.core.optional_dependencies import require
from normkit.lab.experiment import Experiment
from normkit.lab.report import verdicts
from normkit.lab.report.answer import answer, cautions
from normkit.lab.report.scores import Scoreboard
from normkit.lab.report.words import Metric
from normkit.lab.results import Comparison, Result
from normkit.reporting.text import NONE, is_finite, probability

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

WHAT = "The table of verdicts"
WIDE = 110  # columns


def print_verdicts(
    experiment: Experiment,
    results: Mapping[str, Result],
    comparisons: Sequence[Comparison],
    console: Console | None = None,
    failures: Collection[str] = (),
) -> None:
    """The answer, the table and what to beware of, on a terminal or any rich console."""
    text = require("rich.text", "cli", WHAT).Text
    if console is None:
        console = require("rich.console", "cli", WHAT).Console(highlight=False)
    board = Scoreboard(experiment, results, failures)
    console.print(text(answer(board, comparisons).lead, style="bold"))
    if board.counts["finished"]:
        wide = console.width >= WIDE
        console.print(verdict_table(board, comparisons, wide=wide))
    for caution in cautions(board):
        console.print(text(f"! {caution}", style="yellow"))


def verdict_table(
    board: Scoreboard, comparisons: Sequence[Comparison], *, wide: bool = True
) -> Table:
    """A rich table; names are texts, so that nothing a user typed is read as markup.

    A narrow one has no p-values.
    """
    rich_table = require("rich.table", "cli", WHAT)
    text = require("rich.text", "cli", WHAT).Text
    box = require("rich.box", "cli", WHAT)
    metric = board.metric
    corrected = board.experiment.multiplicity == "holm"
    table: Table = rich_table.Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    axes = verdicts.axis_heads(board)
    for axis in axes:
        table.add_column(text(axis), justify="right", max_width=None if wide else 8)
    table.add_column("variant", overflow="fold")
    table.add_column(text(metric.title.lower()), justify="right", min_width=12)
    table.add_column("difference" if wide else "diff.", justify="right", no_wrap=True)
    table.add_column("95 % interval", justify="right", min_width=14)
    if wide:
        table.add_column("p (Holm)" if corrected else "p", justify="right", no_wrap=True)
    table.add_column("seeds", justify="right")
    table.add_column("verdict", min_width=11)
    last = None
    for row in verdicts.verdict_rows(board, comparisons):
        if last is not None and row.grid_values != last:
            table.add_section()
        place = ["" if row.grid_values == last else word for _, word in row.grid_values]
        last = row.grid_values
        cells = [*place, row.style.name, *_numbers(row, metric, wide)]
        style = "dim" if row.comparison is None else ""
        verdict = text(row.verdict, style=verdicts.LOOKS[row.verdict].style)
        notes = [row.more] if row.more else []
        lost = len(row.scores.lost)
        for word, seeds in row.scores.losses:
            if count := len(seeds):
                notes.append(counted(count, "seed") if row.verdict == word else f"{count} {word}")
        if notes:
            verdict.append(f" ({', '.join(notes)})", style="red" if lost else "dim")
        table.add_row(*(text(cell, style=style) for cell in cells), verdict)
    return table


def _numbers(row: verdicts.VerdictRow, metric: Metric, wide: bool) -> list[str]:
    c = row.comparison
    score = metric.spread(row.scores.mean, row.scores.std)
    if c is None:
        return [score, "", "", *([""] if wide else []), str(len(row.scores.by_seed))]
    p = probability(c.p_difference_holm)
    interval = f"{metric.plain(c.low)} to {metric.plain(c.high)}" if is_finite(c.low) else NONE
    difference = metric.plain(c.difference, sign=True)
    return [score, difference, interval, *([p] if wide else []), str(c.pairs)]
