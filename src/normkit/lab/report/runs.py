"""Every run with its state: done, diverged, failed or not run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from normkit.lab.report.arranging import axes_of
from normkit.lab.report.scores import Board
from normkit.lab.report.sentences import at
from normkit.lab.report.styling import Look
from normkit.lab.report.words import listed, value_words
from normkit.lab.results import DIVERGED, DONE, Result

NOT_RUN, FAILED = "not run", "failed"


@dataclass(frozen=True)
class RunRow:
    look: Look
    place: tuple[tuple[Any, str], ...]
    seed: int
    state: str
    score: float | None
    result: Result | None
    id: str
    note: str


def run_rows(board: Board, looks: Mapping[str, Look], failures: Mapping[str, str]) -> list[RunRow]:
    axes = list(axes_of(board.experiment.cells()))
    made = []
    for scores in board:
        cell = dict(scores.variant.cell)
        place = tuple((cell.get(axis), value_words(cell.get(axis))) for axis in axes)
        for seed, run in scores.runs.items():
            result = scores.results.get(seed)
            failed = failures.get(run.id, "") if result is None else ""
            state = FAILED if failed else NOT_RUN
            if result is not None:
                state = DIVERGED if seed in scores.diverged else DONE
            note = result.note if result is not None else failed
            score = scores.by_seed.get(seed)
            look = looks[scores.variant.name]
            made.append(RunRow(look, place, seed, state, score, result, run.id, note))
    return made


def gaps(board: Board, failures: Mapping[str, str]) -> list[str]:
    """What was not run, in sentences."""
    found = []
    for scores in board:
        for state, seeds in _missing(scores.missing, scores.runs, failures).items():
            if seeds:
                name = f"{scores.variant.name} {at(scores.variant.cell)}".removesuffix(" at ")
                word = "seed" if len(seeds) == 1 else "seeds"
                everything = len(seeds) == len(scores.runs)
                which = "every seed" if everything else f"{word} {listed(seeds, most=20)}"
                reasons = dict.fromkeys(failures.get(scores.runs[seed].id, "") for seed in seeds)
                why = f": {listed(reasons, most=3)}" if state == FAILED else ""
                found.append(f"{name}: {which} {state}{why}")
    return found


def _missing(
    seeds: list[int], runs: Mapping[int, Any], failures: Mapping[str, str]
) -> dict[str, list[int]]:
    failed = [seed for seed in seeds if failures.get(runs[seed].id)]
    return {FAILED: failed, NOT_RUN: [seed for seed in seeds if seed not in failed]}


def diverged(board: Board) -> list[str]:
    """What diverged, and what is known of it."""
    found = []
    for scores in board:
        for seed in scores.diverged:
            name = f"{scores.variant.name} {at(scores.variant.cell)}".removesuffix(" at ")
            note = scores.results[seed].note or "the score is not finite"
            found.append(f"{name}, seed {seed}: {note}")
    return found
