"""What claims, answers, measures and numbers are called on the pages."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from normkit.lab.experiment import Cell
from normkit.lab.report.words import cell_words
from tools.evidence.claims import Claim
from tools.evidence.judge import NOT_RUN, ClaimRow

# measures in words, and how many digits they have
MEASURES = {
    "condensation": "mean cosine between images at the first norm's input, over the epochs; less "
    "is better",
    "stat_diff": "StatDiff, mean over layers and epochs; less is better",
    "esm_std": "ESM of the deviations, mean over the batch norms that both have; less is better",
    "esm_std_trend": "rank correlation of ESM with depth in each run; 0 is no trend, 1 grows "
    "all along",
    "disturbance": "accuracy lost with errors up to 0.5, points; less is better",
    "corruption": "accuracy lost on damaged images, points; less is better",
    "corruption_adapted": "accuracy lost on damaged images after adaptation, points; less is "
    "better",
}
WARM = "train.warmup"
MANY = 4  # differences that are written one by one
POINTS = ("disturbance", "corruption", "corruption_adapted")  # measures that are shares


def where(cell: Cell) -> str:
    """A point of the grid in words."""
    warm = {0: "no warm-up", 1: "warm-up"}
    words = [warm.get(value, "") for key, value in cell if key == WARM]
    rest = cell_words(tuple((key, value) for key, value in cell if key != WARM))
    return ", ".join(filter(None, [*words, rest])) or "everywhere"


def place(claim: Claim, row: ClaimRow) -> str:
    return f"{row.variant}, {where(row.cell)}" if len(claim.expected) > 1 else where(row.cell)


def answer_in_words(claim: Claim, rows: Sequence[ClaimRow], *, whole: bool = True) -> str:
    """What the rows that were run say together, and, for the ``whole``, of how many that is."""
    ran = [row for row in rows if row.answer != NOT_RUN]
    if not ran:
        return NOT_RUN
    said = Counter(row.said for row in ran)
    words = "; ".join(
        answer if len(said) == 1 else f"{answer} in {many} of {len(ran)}"
        for answer, many in said.items()
    )
    part = _part_run(claim, rows, ran)
    return f"{words} ({part} run)" if part and whole else words


def _part_run(claim: Claim, rows: Sequence[ClaimRow], ran: Sequence[ClaimRow]) -> str:
    """Which values were run, if these are all rows of them; else how many rows; "": all."""
    parts = []
    there = list(rows)
    for key, name in (claim.over, (WARM, "schedules")):
        planned, found = ({_value(row, key) for row in each} for each in (rows, ran))
        there = [row for row in there if _value(row, key) in found]
        if len(found) < len(planned):
            parts.append(f"{len(found)} of {len(planned)} {name}")
    if len(there) > len(ran):
        return f"{len(ran)} of {len(rows)} rows"
    return ", ".join(parts)


def _value(row: ClaimRow, key: str) -> object:
    return row.variant if key == "variant" else dict(row.cell).get(key)


def not_run_in_words(claim: Claim, rows: Sequence[ClaimRow]) -> str:
    """Which rows were not run, schedule by schedule; "" if there are none."""
    parts = []
    for schedule in dict.fromkeys(_value(row, WARM) for row in rows):
        own = [row for row in rows if _value(row, WARM) == schedule]
        lacking = [row for row in own if row.answer == NOT_RUN]
        if lacking and schedule is not None and len(lacking) == len(own):
            parts.append("all with warm-up" if schedule == 1 else "all without warm-up")
        else:
            parts += [place(claim, row) for row in lacking]
    return "; ".join(parts)


def differences_in_words(claim: Claim, rows: Sequence[ClaimRow]) -> str:
    """Of the rows that were run; of many, the range."""
    ran = [row.difference for row in rows if row.answer != NOT_RUN]
    known = sorted(each for each in ran if not math.isnan(each))
    write = Digits(claim).signed
    if len(ran) > MANY and known:
        return f"{write(known[0])} to {write(known[-1])}"
    return ", ".join(map(write, ran))


def pairs_in_words(rows: Sequence[ClaimRow]) -> str:
    """How many pairs the rows that were run have: a range where they differ."""
    found = [row.pairs for row in rows if row.answer != NOT_RUN]
    low, high = min(found, default=0), max(found, default=0)
    return f"{low}–{high}" if low < high else f"{high or ''}"


class Digits:
    """How the numbers of a claim are written: shares in percent, measures as they are."""

    def __init__(self, claim: Claim | None = None) -> None:
        plain = claim is not None and claim.measure and claim.measure not in POINTS
        self.factor, self.places = (1.0, 3) if plain else (100.0, 2)

    def spread(self, mean: float, std: float) -> str:
        if math.isnan(mean):
            return "–"
        first = f"{self.factor * mean:.{self.places}f}"
        return first if math.isnan(std) else f"{first} ± {self.factor * std:.{self.places}f}"

    def signed(self, value: float) -> str:
        return "–" if math.isnan(value) else f"{self.factor * value:+.{self.places}f}"
