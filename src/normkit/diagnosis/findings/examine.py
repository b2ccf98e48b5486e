"""All examiners, in the order in which they are asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from normkit.diagnosis.findings import (
    buffers,
    channels,
    initial_statistics,
    outcome,
    shift,
    training,
    updates,
)
from normkit.diagnosis.findings.evidence import Evidence
from normkit.diagnosis.findings.finding import EarlierFindings, Finding, Kind, rank_of

Examiner = Callable[[Evidence, EarlierFindings], Iterator[Finding]]

# What is certain comes first, symptoms later: an examiner is told which norms have statistics
# that an earlier one has found wrong for a cause, and does not report these again.
EXAMINERS: tuple[Examiner, ...] = (
    outcome.nonfinite_weights,
    buffers.nonfinite_statistics,
    buffers.negative_variance,
    buffers.narrow_types,
    buffers.nonfinite_batches,
    buffers.moving_average,
    initial_statistics.held_at_start,
    initial_statistics.never_moved,
    updates.momentum_too_large,
    updates.too_few_batches,
    updates.batch_counts,
    training.norm_modes,
    training.training_batches,
    buffers.rank_disagreement,
    shift.dropout_before_norm,
    shift.estimation_shift,
    channels.tiny_groups,
    channels.shared_statistics,
    channels.saturated_gates,
    channels.dead_channels,
    channels.exploding_scale,
    channels.eps_dominates,
    outcome.standardized_without_norm,
    outcome.untrained_parameters,
    outcome.nonfinite_output,
    outcome.train_eval_gap,
    outcome.condensed_features,
)
PARTS = (buffers, initial_statistics, updates, training, shift, channels, outcome)
KINDS = {k.name: k for part in PARTS for k in vars(part).values() if isinstance(k, Kind)}


def examine(evidence: Evidence) -> tuple[Finding, ...]:
    """All findings, the worst first; among equals the cause before the symptom."""
    earlier = EarlierFindings()
    for examiner in EXAMINERS:
        for finding in list(examiner(evidence, earlier)):
            earlier.add(finding, KINDS[finding.kind].spoils)
    return tuple(sorted(earlier.findings, key=lambda finding: rank_of(finding.severity)))
