"""The beginning of docs/evidence.md: claims by what all their rows say together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from normkit.lab.statistics import UNSTABLE
from tools.evidence.claims import ALL, Claim
from tools.evidence.evidence import Evidence
from tools.evidence.judge import (
    CONTRADICTED,
    FAILS,
    HOLDS,
    NOT_RUN,
    NOT_SHOWN,
    ClaimRow,
    claim_experiment,
)
from tools.evidence.words import place

IN_PART, NOWHERE = "in part", "nowhere"
HEADINGS = {
    HOLDS: "Hold",
    CONTRADICTED: "Contradicted here",
    NOWHERE: "Contradicted in some rows, shown in none",
    FAILS: "Do not hold here",
    NOT_SHOWN: "Not shown, for want of seeds",
    UNSTABLE: "Unstable: runs were lost",
    IN_PART: "In part",
    NOT_RUN: "Not run",
}


def in_a_minute(evidence: Evidence) -> Iterator[str]:
    """A list for each heading, of letters and their claims."""
    groups: dict[str, list[int]] = {heading: [] for heading in HEADINGS}
    for i, rows in enumerate(evidence.rows):
        groups[together(rows)].append(i)
    yield f"{len(ALL)} claims; † where some rows of a claim, or seeds of one, are still missing."
    yield ""
    for heading, members in groups.items():
        if members:
            yield f"- **{HEADINGS[heading]}** ({len(members)})"
            for letter in dict.fromkeys(ALL[i].letter for i in members):
                yield f"  - {_in_short(evidence, members, letter)}"


def together(rows: Sequence[ClaimRow]) -> str:
    """What the rows that were run say: one thing all of them, or not."""
    answers = {row.answer for row in rows if row.answer != NOT_RUN}
    if UNSTABLE in answers:
        return UNSTABLE
    if len(answers) < 2:
        return next(iter(answers), NOT_RUN)
    return NOWHERE if CONTRADICTED in answers and HOLDS not in answers else IN_PART


def _in_short(evidence: Evidence, members: Sequence[int], letter: str) -> str:
    """Of one letter the claims, and which of them are incomplete."""
    texts = []
    for i in members:
        if ALL[i].letter == letter:
            some = any(row.answer != NOT_RUN for row in evidence.rows[i])
            mark = " †" if some and _lacks_runs(evidence, ALL[i]) else ""
            texts.append(f"{ALL[i].text}{mark}{_beside_lost(ALL[i], evidence.rows[i])}")
    return f"[({letter})](#{letter}) {'; '.join(texts)}"


def _beside_lost(claim: Claim, rows: Sequence[ClaimRow]) -> str:
    """Where runs were lost, what the rows say in which none was; "" where none were."""
    if together(rows) != UNSTABLE:
        return ""
    others = [row for row in rows if row.answer not in (UNSTABLE, NOT_RUN)]
    told = "; ".join(f"{place(claim, row)}: {row.said}" for row in others)
    return f" ({told})" if told else ""


def _lacks_runs(evidence: Evidence, claim: Claim) -> bool:
    """Are runs that a claim is to be judged by still missing, whole rows or seeds?"""
    seeds = evidence.experiments[claim.file].seeds
    runs = (run for each in claim_experiment(claim).variants for run in each.runs(seeds))
    return any(run.id not in evidence.pool for run in runs)
