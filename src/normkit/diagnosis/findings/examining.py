"""All examiners, in the order in which they are asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from normkit.diagnosis.findings import (
    averaging,
    beginnings,
    buffers,
    channels,
    copies,
    counting,
    groups,
    inputs,
    modes,
    noise,
    outcome,
    shift,
    stillness,
    training,
    weights,
)
from normkit.diagnosis.findings.evidence import Evidence
from normkit.diagnosis.findings.finding import Finding, Kind, rank_of
from normkit.diagnosis.findings.known import Known

Examiner = Callable[[Evidence, Known], Iterator[Finding]]

# What is certain comes first, symptoms later: an examiner is told which norms have statistics
# that an earlier one has found wrong for a cause, and does not report these again.
EXAMINERS: tuple[Examiner, ...] = (
    outcome.broken,
    *buffers.EXAMINERS,
    copies.averages,
    *stillness.EXAMINERS,
    *beginnings.EXAMINERS,
    *averaging.EXAMINERS,
    *counting.EXAMINERS,
    *modes.EXAMINERS,
    *training.EXAMINERS,
    copies.ranks,
    *noise.EXAMINERS,
    *shift.EXAMINERS,
    *groups.EXAMINERS,
    *channels.EXAMINERS,
    *weights.EXAMINERS,
    *outcome.EXAMINERS,
)
PARTS = (
    *(buffers, stillness, beginnings, averaging, counting, modes, training, copies),
    *(noise, shift, inputs, groups, channels, weights, outcome),
)
KINDS: dict[str, Kind] = {kind.name: kind for part in PARTS for kind in part.KINDS}


def examine(evidence: Evidence) -> tuple[Finding, ...]:
    """All findings, the worst first; among equals the cause before the symptom."""
    known = Known()
    for examiner in EXAMINERS:
        for finding in list(examiner(evidence, known)):
            known.add(finding, KINDS[finding.kind].spoils)
    return tuple(sorted(known.findings, key=lambda finding: rank_of(finding.severity)))
