"""A comparison in words: its verdict, its numbers, and what is to be said about its seeds."""

from __future__ import annotations

from normkit.core.messages import counted
from normkit.lab.experiment import Cell
from normkit.lab.report.metrics import Metric
from normkit.lab.report.scores import Board
from normkit.lab.report.words import cell_words, known, rough
from normkit.lab.results import Comparison


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


def at(cell: Cell) -> str:
    """at 2 samples a worker; for resnet18."""
    named = any(isinstance(value, str) for _, value in cell)
    return f"{'for' if named else 'at'} {cell_words(cell)}"
