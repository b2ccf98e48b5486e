"""Groups that are too small to be normalized, and norms that serve several places."""

from __future__ import annotations

from collections.abc import Iterator

from normkit.core.messages import counted
from normkit.diagnosis.findings.bounds import OFF, WRONG
from normkit.diagnosis.findings.evidence import Evidence
from normkit.diagnosis.findings.finding import Finding, Kind, listed, named
from normkit.diagnosis.findings.known import Known
from normkit.diagnosis.findings.layer import Layer

ERASING = Kind(
    "tiny-groups",
    "A norm erases what it is given",
    "A single value minus its mean is 0: a group of one element gives the bias, whatever comes in. "
    "Of two elements only the sign of their difference is left, of m none is above √(m − 1).",
    "Wu & He 2018 (gn); opacus#567",
)
SHARED = Kind(
    "shared-statistics",
    "One norm serves several places with different statistics",
    "Its running statistics are a mixture and fit none of the places, while in training each batch "
    "is normalized by its own.",
    "Huang et al. 2022 (estimation-shift), section 4; CycleBatchNormList of detectron2",
)


def erasing(evidence: Evidence, known: Known) -> Iterator[Finding]:
    counts = {x: n for x in evidence.layers if (n := elements(x)) is not None and n <= 2}
    if counts:
        worst = min(counts, key=lambda layer: counts[layer])
        paths = [x.path for x in counts]
        few = counts[worst]
        yield ERASING.found(
            "serious" if few == 1 else "warning",
            paths,
            f"{named(worst.path)} takes statistics over groups of {counted(few, 'element')}: input "
            f"{_shape(worst)}, {worst.site.groups or worst.site.channels} groups"
            + (": the output is constant." if few == 1 else ": the output is 1 or −1."),
            worst=worst.path,
            remedy=f"nk.convert(model, 'gn', groups=1, where={listed(paths)})  # and train on",
            elements=few,
            layers=len(counts),
        )


def elements(layer: Layer) -> int | None:
    """How many values share statistics within a sample; None where samples share them."""
    shape = layer.eval.shape if layer.eval is not None else None
    return None if shape is None else layer.measured.group_size(shape)


def _shape(layer: Layer) -> str:
    shape = layer.eval.shape if layer.eval is not None and layer.eval.shape else ()
    return f"({', '.join(['N', *map(str, shape[1:])])})"


def shared(evidence: Evidence, known: Known) -> Iterator[Finding]:
    apart: dict[Layer, float] = {}
    for layer in evidence.running():
        calls = layer.own.of_calls if layer.own is not None and not layer.frozen else []
        together = None if layer.own is None else layer.own.expected.total
        if len(calls) > 1 and together is not None:
            errors = [layer.distance(together, c.total) for c in calls if c.total is not None]
            apart[layer] = max(errors)
    far = [x for x, error in apart.items() if error >= OFF]
    if far:
        worst = max(far, key=lambda layer: apart[layer])
        assert worst.own is not None
        paths = [x.path for x in far]
        yield SHARED.found(
            "serious" if apart[worst] >= WRONG else "warning",
            paths,
            f"{named(worst.path)} is called {len(worst.own.of_calls)} times in a forward, and what "
            f"it is given differs: statistics of all calls are off by {apart[worst]:.2f} for one.",
            worst=worst.path,
            remedy=f"nk.convert(model, 'gn', where={listed(paths)})  # and train on",
            calls=len(worst.own.of_calls),
            output_error=apart[worst],
            layers=len(far),
        )


EXAMINERS = (erasing, shared)
KINDS = (ERASING, SHARED)
