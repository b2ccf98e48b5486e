"""Of which code the committed runs are, and which comparisons pair runs of several sweeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from normkit.lab.results import Result
from tools.evidence.claims import ALL
from tools.evidence.judge import NO_TREND, NOT_RUN, ClaimRow, claim_experiment

CLEAN, CHANGED, UNKNOWN = "clean", "changed", "unknown"


def code_states(results: Iterable[Result]) -> Counter[str]:
    """How many runs are of a commit as it is, of one with changes, and of one that is not known."""
    commits = [result.environment.get("commit", "") for result in results]
    return Counter(
        UNKNOWN if not each else CHANGED if each.endswith(" with changes") else CLEAN
        for each in commits
    )


def across_sweeps(
    rows: Sequence[Sequence[ClaimRow]], results: Mapping[str, Result]
) -> tuple[int, int]:
    """How many of the comparisons pair some seed's runs of two sweeps; and of how many."""
    mixed = []
    for claim, own in zip(ALL, rows, strict=True):
        experiment = claim_experiment(claim)
        for row in own:
            if row.answer == NOT_RUN or row.baseline == NO_TREND:
                continue
            ours, theirs = (
                {
                    run.seed: results[run.id].environment.get("sweep")
                    for run in experiment.variant(name, row.cell).runs(experiment.seeds)
                    if run.id in results
                }
                for name in (row.variant, row.baseline)
            )
            mixed.append(any(ours[seed] != theirs[seed] for seed in ours if seed in theirs))
    return sum(mixed), len(mixed)


def provenance(rows: Sequence[Sequence[ClaimRow]], results: Mapping[str, Result]) -> str:
    """Both in a sentence."""
    states = code_states(results.values())
    mixed, all_of_them = across_sweeps(rows, results)
    direct = sum(each.environment.get("recorded", "").startswith("no") for each in results.values())
    return (
        f"{states[CHANGED]} runs are of a commit with changes that were not committed, "
        f"{states[CLEAN]} of a commit as it is, and {states[UNKNOWN]} do not say of which; "
        f"{direct} were trained step by step, the others as CUDA graphs; "
        f"{mixed} of {all_of_them} comparisons pair runs of different sweeps in at least one seed."
    )
