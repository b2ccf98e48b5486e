"""How many batches entered running statistics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from normkit.diagnosis.findings.bounds import COUNTED, FITS
from normkit.diagnosis.findings.evidence import Evidence
from normkit.diagnosis.findings.finding import Finding, Kind, named
from normkit.diagnosis.findings.known import Known
from normkit.diagnosis.findings.layer import Layer

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


def counts(evidence: Evidence, known: Known) -> Iterator[Finding]:
    layers = [
        x
        for x in evidence.running()
        if x.learns and x.count and x.own and x.path not in known.spoiled
    ]
    expected = evidence.steps or _usual(layers)
    if not expected:
        return
    ratio = {x: _batches(x) / (expected * _calls(x)) for x in layers}
    twice = [x for x, r in ratio.items() if r > 1.5 and abs(r / round(r) - 1) < COUNTED]
    yield from _counted(TWICE, twice, ratio, evidence, _fold)
    if evidence.steps:
        extra = [x for x, r in ratio.items() if r > 1 + COUNTED and x not in twice]
        yield from _counted(EXTRA, extra, ratio, evidence, _excess)
        missed = [x for x, r in ratio.items() if r < 1 - COUNTED]
        yield from _counted(MISSED, missed, ratio, evidence, _lack)


def _usual(layers: Sequence[Layer]) -> int:
    """What most norms have counted a call; 0 if there is no majority."""
    counted = Counter(round(_batches(x) / _calls(x)) for x in layers)
    if not counted:
        return 0
    value, votes = counted.most_common(1)[0]
    return value if votes > len(layers) / 2 else 0


def _calls(layer: Layer) -> int:
    return max(1, len(layer.own.of_calls)) if layer.own else 1


def _batches(layer: Layer) -> int:
    """Batches that came: those that were left out as not finite, too."""
    out = layer.buffer("nonfinite_batches")
    return (layer.count or 0) + (0 if out is None else int(out))


def _counted(  # type: ignore[no-untyped-def]
    kind: Kind, layers: list[Layer], ratio: dict[Layer, float], evidence: Evidence, say
) -> Iterator[Finding]:
    if not layers:
        return
    worst = max(layers, key=lambda layer: abs(ratio[layer] - 1))
    expected = round(_batches(worst) / ratio[worst])
    severity = "warning"
    if kind is MISSED:  # the statistics show whether it did any harm
        fit = all(x.fits(FITS) for x in layers)
        severity = "note" if fit else evidence.severity(layers)
    known = "were trained on" if evidence.steps else "most other norms have counted"
    yield kind.found(
        severity,
        [x.path for x in layers],
        f"{named(worst.path)} has counted {_batches(worst)} batches where {expected} {known}"
        f"{say(ratio[worst])}.",
        worst=worst.path,
        remedy=_REMEDIES[kind.name].format(
            calibrating=evidence.calibrating, repairing=evidence.repairing
        ),
        counted=_batches(worst),
        expected=expected,
        ratio=ratio[worst],
        layers=len(layers),
    )


def _fold(ratio: float) -> str:
    return f": {round(ratio)} times each"


def _excess(ratio: float) -> str:
    return f", {ratio - 1:.0%} more"


def _lack(ratio: float) -> str:
    return f", {1 - ratio:.0%} less"


_REMEDIES = {
    TWICE.name: "nk.convert(model, 'bn')  # counts a batch once, under checkpointing too",
    EXTRA.name: "model.eval(); {calibrating}",
    MISSED.name: "{repairing}",
}


EXAMINERS = (counts,)
KINDS = (TWICE, EXTRA, MISSED)
