"""Under which heading a claim stands, and what its line says of lost runs."""

from __future__ import annotations

import dataclasses

import pytest

from claims_made_up import claim_of, made_up
from tools.evidence.evidence import Evidence
from tools.evidence.judge import judge
from tools.evidence.minute import HEADINGS, in_a_minute, together


@pytest.mark.parametrize(
    ("answers", "heading"),
    [
        (["holds", "holds"], "Hold"),
        (["contradicted", "not shown"], "Contradicted in some rows, shown in none"),
        (["contradicted", "does not hold"], "Contradicted in some rows, shown in none"),
        (["contradicted", "holds"], "In part"),
        (["holds", "not shown"], "In part"),
        (["contradicted", "not run"], "Contradicted here"),
        (["contradicted", "unstable"], "Unstable: runs were lost"),
        (["not run", "not run"], "Not run"),
    ],
)
def test_what_no_row_shows_is_not_in_part(answers: list[str], heading: str) -> None:
    """Claims on XBN, against which all twelve rows lean, stood under "In part"."""
    rows = judge(claim_of("UBN beats BN at the end"), made_up("g-ubn", {"ubn": 0.02}))
    rows = [dataclasses.replace(r, answer=a) for r, a in zip(rows, answers, strict=True)]
    assert HEADINGS[together(rows)] == heading


def test_beside_lost_runs_stands_what_the_other_schedule_says() -> None:
    """Claims on a ResNet-18 hold with warm-up: of that the heading says nothing."""
    text = "\n".join(in_a_minute(Evidence()))
    lost = text.partition("**Unstable: runs were lost**")[2].partition("- **")[0]
    assert "BCN + WS beats BN in a ResNet-18 (warm-up: holds)" in lost
    assert lost.count("(warm-up: holds)") == 2
