"""How many batches entered running statistics, and with what weight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from normkit.diagnosis.findings.bounds import COUNTED, FITS, MOSTLY, START_LEFT, averaged_batches
from normkit.diagnosis.findings.evidence import Evidence
from normkit.diagnosis.findings.finding import (
    EarlierFindings,
    Finding,
    Kind,
    conversion,
    named,
    places,
)
from normkit.diagnosis.findings.norm import NormEvidence

MOMENTUM_ONE = Kind(
    "momentum-one",
    "Momentum 1 keeps the last batch only",
    "Running statistics are then those of whatever batch came last, with all of its noise.",
    "Huang et al. 2022 (estimation-shift), eq. 3",
    spoils=True,
)
INVERTED = Kind(
    "momentum-inverted",
    "Momentum weighs the new batch more than all before",
    "TensorFlow and some papers call the weight of the old value momentum, torch that of the new "
    "batch: 0.9 there is 0.1 here. A running average of two batches is little better than one.",
    "Huang et al. 2022 (estimation-shift), eq. 3; semantics of TF and torch differ",
    spoils=True,
)
UNRIPE = Kind(
    "unripe-statistics",
    "Running statistics still hold their start values",
    "After b batches (1 − momentum)^b of the start, mean 0 and variance 1, is left in a running "
    "average. Too few batches, or too small a momentum for them.",
    "Huang et al. 2022 (estimation-shift), section 4; timgaripov/swa#8",
    spoils=True,
)
TWICE = Kind(
    "double-update",
    "Batches entered the running statistics more than once",
    "Activation checkpointing computes a forward again, and torch.nn's batch norm then updates "
    "again: two equal steps are one with momentum 0.19. Older batches are forgotten too early.",
    "pytorch#96136, fairscale#1035, YOLO-Master#262",
)
EXTRA = Kind(
    "extra-updates",
    "More batches entered the running statistics than were trained on",
    "Forward passes in training mode without a training step, as when a validation runs before "
    "eval() is called: data that must not be learned from are in the statistics.",
    "timgaripov/swa#15, GACNet#8, HiDDeN#13",
)
MISSED = Kind(
    "missed-updates",
    "Fewer batches entered the running statistics than were trained on",
    "The norms were in eval mode for part of the training, so their statistics belong to older "
    "weights, and the weights were fitted to older statistics.",
    "chemprop#952, gt-pyg#112",
)


def momentum_too_large(evidence: Evidence, earlier: EarlierFindings) -> Iterator[Finding]:
    learning = [x for x in evidence.running() if x.learns and x.momentum is not None]
    one = [x for x in learning if x.momentum == 1]
    more = [x for x in learning if MOSTLY <= (x.momentum or 0) < 1]
    for kind, layers in ((MOMENTUM_ONE, one), (INVERTED, more)):
        if layers:
            worst = max(layers, key=lambda layer: _or_zero(layer.error))
            momentum = worst.momentum or 0.0
            number = averaged_batches(momentum)
            noise = "the last batch" if number < 1.05 else f"the mean of {number:.2g} batches"
            yield kind.finding(
                evidence.severity(layers),
                layers,
                f"Momentum is {momentum:g} in {places(layers)}: the running average is as noisy as "
                f"{noise}, and off by up to {_or_zero(worst.error):.2f} on the data.",
                worst=worst,
                remedy="[setattr(m, 'momentum', 0.1) for m in model.modules() "
                "if isinstance(getattr(m, 'momentum', None), (int, float)) and m.momentum >= 0.5]; "
                + evidence.calibrating,
                momentum=momentum,
                batches=number,
                output_error=worst.error,
            )


def too_few_batches(evidence: Evidence, earlier: EarlierFindings) -> Iterator[Finding]:
    left = {x: _left(x) for x in evidence.running() if x.path not in earlier.spoiled and x.learns}
    # by its count alone, a norm that was calibrated since would hold start values for ever; where
    # one cannot hold its share, the others that have counted as many were calibrated with it
    few = {x: share for x, share in left.items() if share > START_LEFT}
    calibrated = {x.count for x, share in few.items() if x.without_start(share) is None}
    layers = [
        x
        for x, share in few.items()
        if x.count not in calibrated and not x.fits(FITS) and x.owed_to_start(share)
    ]
    if layers:
        worst = max(layers, key=lambda layer: (left[layer], _or_zero(layer.error)))
        yield UNRIPE.finding(
            "serious" if left[worst] > MOSTLY else evidence.severity(layers),
            layers,
            f"{left[worst]:.0%} of the running statistics of {named(worst.path)} is still mean 0 "
            f"and variance 1: it has counted {worst.count} batches at momentum {worst.momentum:g}.",
            worst=worst,
            remedy=evidence.calibrating,
            start_left=left[worst],
            batches=worst.count,
            momentum=worst.momentum,
            output_error=worst.error,
            layers=len(layers),
        )


def _left(layer: NormEvidence) -> float:
    """The share of the start values in the running statistics; 0 if it cannot be told."""
    momentum = layer.momentum
    counts = layer.count and layer.measured.counts_what_it_blends
    if not counts or momentum is None or not 0 < momentum < 1:
        return 0.0
    return (1 - momentum) ** (layer.count or 0)


def _or_zero(error: float) -> float:
    return 0.0 if error != error else error


def batch_counts(evidence: Evidence, earlier: EarlierFindings) -> Iterator[Finding]:
    learning = [x for x in evidence.running() if x.learns and x.count and x.own]
    counted = {x: _counted(x) for x in learning if x.path not in earlier.spoiled}
    expected = evidence.steps or _usual(counted)
    if not expected:
        return
    ratio = {x: count / (expected * _calls(x)) for x, count in counted.items()}
    twice = [x for x, r in ratio.items() if r > 1.5 and abs(r / round(r) - 1) < COUNTED]
    extra = [x for x, r in ratio.items() if r > 1 + COUNTED and x not in twice]
    missed = [x for x, r in ratio.items() if r < 1 - COUNTED]
    for kind, layers in ((TWICE, twice), (EXTRA, extra), (MISSED, missed)):
        if not layers or (kind is not TWICE and not evidence.steps):
            continue
        worst = max(layers, key=lambda layer: abs(ratio[layer] - 1))
        times = ratio[worst]
        severity, difference, remedy = {
            TWICE: (
                "warning",
                f": {round(times)} times each",
                f"{conversion(TWICE)}  # counts a batch once, under checkpointing too",
            ),
            EXTRA: ("warning", f", {times - 1:.0%} more", f"model.eval(); {evidence.calibrating}"),
            MISSED: (  # the statistics show whether it did any harm
                "note" if all(x.fits(FITS) for x in layers) else evidence.severity(layers),
                f", {1 - times:.0%} less",
                evidence.repairing,
            ),
        }[kind]
        usual = round(counted[worst] / times)
        source = "were trained on" if evidence.steps else "most other norms have counted"
        yield kind.finding(
            severity,
            layers,
            f"{named(worst.path)} has counted {counted[worst]} batches where {usual} {source}"
            f"{difference}.",
            worst=worst,
            remedy=remedy,
            counted=counted[worst],
            expected=usual,
            ratio=times,
            layers=len(layers),
        )


def _usual(counted: dict[NormEvidence, int]) -> int:
    """What most norms have counted a call; 0 if there is no majority."""
    votes = Counter(round(count / _calls(x)) for x, count in counted.items())
    value, most = votes.most_common(1)[0] if votes else (0, 0)
    return value if most > len(counted) / 2 else 0


def _calls(layer: NormEvidence) -> int:
    return max(1, len(layer.own.of_calls)) if layer.own else 1


def _counted(layer: NormEvidence) -> int:
    """Batches that came: those that were left out as not finite, too."""
    out = layer.buffer("nonfinite_batches")
    return (layer.count or 0) + (0 if out is None else int(out))
