"""The weight of each batch in running statistics."""

from __future__ import annotations

from collections.abc import Iterator

from normkit.diagnosis.findings.bounds import FITS, MOSTLY, START_LEFT, averaged_batches
from normkit.diagnosis.findings.evidence import Evidence
from normkit.diagnosis.findings.finding import Finding, Kind, named, places
from normkit.diagnosis.findings.known import Known
from normkit.diagnosis.findings.layer import Layer

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


def momenta(evidence: Evidence, known: Known) -> Iterator[Finding]:
    learning = [x for x in evidence.running() if x.learns and x.momentum is not None]
    one = [x for x in learning if x.momentum == 1]
    more = [x for x in learning if MOSTLY <= (x.momentum or 0) < 1]
    for kind, layers in ((MOMENTUM_ONE, one), (INVERTED, more)):
        if layers:
            worst = max(layers, key=lambda layer: _known(layer.error))
            momentum = worst.momentum or 0.0
            yield kind.found(
                evidence.severity(layers),
                [layer.path for layer in layers],
                f"Momentum is {momentum:g} in {places([x.path for x in layers])}: the running "
                f"average is as noisy as {_batches(momentum)}, and off by up to "
                f"{_known(worst.error):.2f} on the data.",
                worst=worst.path,
                remedy="[setattr(m, 'momentum', 0.1) for m in model.modules() "
                "if isinstance(getattr(m, 'momentum', None), (int, float)) and m.momentum >= 0.5]; "
                + evidence.calibrating,
                momentum=momentum,
                batches=averaged_batches(momentum),
                output_error=worst.error,
            )


def _batches(momentum: float) -> str:
    number = averaged_batches(momentum)
    return "the last batch" if number < 1.05 else f"the mean of {number:.2g} batches"


def unripe(evidence: Evidence, known: Known) -> Iterator[Finding]:
    left = {x: _left(x) for x in evidence.running() if x.path not in known.spoiled and x.learns}
    layers = [x for x, share in left.items() if share > START_LEFT and not x.fits(FITS)]
    if layers:
        worst = max(layers, key=lambda layer: (left[layer], _known(layer.error)))
        yield UNRIPE.found(
            "serious" if left[worst] > MOSTLY else evidence.severity(layers),
            [x.path for x in layers],
            f"{left[worst]:.0%} of the running statistics of {named(worst.path)} is still mean 0 "
            f"and variance 1: it has counted {worst.count} batches at momentum {worst.momentum:g}.",
            worst=worst.path,
            remedy=evidence.calibrating,
            start_left=left[worst],
            batches=worst.count,
            momentum=worst.momentum,
            output_error=worst.error,
            layers=len(layers),
        )


def _left(layer: Layer) -> float:
    """The share of the start values in the running statistics; 0 if it cannot be told."""
    momentum = layer.momentum
    counts = layer.count and layer.measured.counts_what_it_blends
    if not counts or momentum is None or not 0 < momentum < 1:
        return 0.0
    return (1 - momentum) ** (layer.count or 0)


def _known(error: float) -> float:
    return 0.0 if error != error else error


EXAMINERS = (momenta, unripe)
KINDS = (MOMENTUM_ONE, INVERTED, UNRIPE)
