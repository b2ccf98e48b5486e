"""All examiners, in the order in which they are asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from normkit.diagnosis.findings import (
    accidents,
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
    buffers.rank_disagreement,
    accidents.mixed_domains,
    accidents.fused_twice,
    accidents.channel_order,
    accidents.other_resolution,
    training.training_batches,  # after what explains it, and what has nothing to do with it
    shift.dropout_before_norm,
    shift.estimation_shift,
    channels.tiny_groups,
    channels.shared_statistics,
    channels.saturated_gates,
    channels.dead_channels,
    channels.exploding_scale,
    channels.eps_dominates,
    accidents.learning_rate,
    outcome.standardized_without_norm,
    outcome.untrained_parameters,
    outcome.nonfinite_output,
    outcome.train_eval_gap,
    outcome.condensed_features,
)
PARTS = (buffers, initial_statistics, updates, training, shift, channels, outcome, accidents)
KINDS = {k.name: k for part in PARTS for k in vars(part).values() if isinstance(k, Kind)}


def examine(evidence: Evidence) -> tuple[Finding, ...]:
    """All findings, the worst first, consequences folded under their causes."""
    earlier = EarlierFindings()
    for examiner in EXAMINERS:
        for finding in list(examiner(evidence, earlier)):
            earlier.add(finding, KINDS[finding.kind].spoils)
    folded = earlier.findings
    if evidence.own is not None:  # else wrong statistics may be why a layer looks dead
        folded = folded_under_causes(folded, [layer.path for layer in evidence.layers])
    return tuple(sorted(folded, key=lambda finding: rank_of(finding.severity)))


def folded_under_causes(findings: Sequence[Finding], order: Sequence[str]) -> list[Finding]:
    """Each consequence under the cause that stands nearest to the input; the rest as they are.

    A cause explains what its kind brings about, from its first layer on; nothing before it. Of two
    findings that could explain each other the one nearer to the input is the cause.
    """
    places = {path: number for number, path in enumerate(order)}

    def place(finding: Finding) -> int:
        return min((places[path] for path in finding.paths if path in places), default=-1)

    def explains(cause: Finding, other: Finding) -> bool:
        if other.kind not in KINDS[cause.kind].brings:
            return False
        mutual = cause.kind in KINDS[other.kind].brings
        return place(cause) < place(other) + (not mutual)

    causes: dict[int, list[Finding]] = {}
    explained: set[int] = set()
    ranked = [(place(f), not KINDS[f.kind].brings, n) for n, f in enumerate(findings)]
    for _, _, number in sorted(ranked):
        if number in explained:
            continue
        others = [n for n in range(len(findings)) if n != number and n not in explained | {*causes}]
        own = [n for n in others if explains(findings[number], findings[n])]
        explained.update(own)
        causes[number] = [findings[n] for n in own]
    return [f.explaining(causes[n]) for n, f in enumerate(findings) if n in causes]
