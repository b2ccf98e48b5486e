"""Running statistics that do not fit the data: old ones, or other data."""

from __future__ import annotations

from collections.abc import Iterator

from normkit.diagnosis.findings.bounds import OFF, SURE
from normkit.diagnosis.findings.evidence import Evidence
from normkit.diagnosis.findings.finding import Finding, Kind, named, places
from normkit.diagnosis.findings.inputs import of_input, other_data, scaled_layer
from normkit.diagnosis.findings.known import Known
from normkit.diagnosis.findings.layer import Layer

STALE = Kind(
    "stale-statistics",
    "Running statistics do not fit the training data",
    "They belong to other weights: weights changed afterwards, by training on, pruning, quantizing "
    "or averaging, or were loaded from another file. The error grows from norm to norm.",
    "Huang et al. 2022 (estimation-shift), section 4; swa#8, once-for-all#15, nncf#41",
    spoils=True,
)
UNCLEAR = Kind(
    "estimation-shift",
    "Running statistics do not fit the data",
    "Either the statistics are old or the data are not those of training. In both cases norms in "
    "eval mode shift and scale their output, and the error grows from norm to norm.",
    "Huang et al. 2022 (estimation-shift), section 4",
    spoils=True,
)


def shift(evidence: Evidence, known: Known) -> Iterator[Finding]:
    layers = [x for x in evidence.running() if x.learns and x.path not in known.spoiled]
    layers = [x for x in layers if x.error_in_eval >= OFF]  # wrong however norms below are set
    off = [x for x in layers if _is_off(x.error, x.uncertainty(x.own))]
    if evidence.trained is None:  # not given, or batch statistics cannot be had
        if off:
            yield scaled_layer(off[0], evidence) or _off(UNCLEAR, off, evidence)
        return
    old = [x for x in layers if _is_off(x.error_on_training, x.uncertainty(x.trained))]
    if old:
        yield _off(STALE, old, evidence)
    elif (found := of_input(evidence)) is not None:
        yield found
    elif off:
        yield other_data(off, evidence)


def _is_off(error: float, by_chance: float) -> bool:
    """Whether an error is large, and no accident of a small sample."""
    return error >= OFF and error > SURE * by_chance


def _off(kind: Kind, layers: list[Layer], evidence: Evidence) -> Finding:
    trained = kind is STALE
    errors = {x.path: x.error_on_training if trained else x.error for x in layers}
    worst = max(errors, key=lambda path: errors[path])
    of = {x.path: x for x in layers}[worst]
    data = "training data" if trained else "data"
    paths = list(errors)
    return kind.found(
        evidence.severity(layers),
        paths,
        f"The running statistics of {places(paths)} do not fit the {data}: they put the output of "
        f"{named(worst)} off by {errors[worst]:.2f}, where 1 is the size of the output itself"
        f" ({of.error_in_eval:.2f} in eval mode, with what comes from below).",
        worst=worst,
        remedy=evidence.repairing,
        missing=""
        if trained
        else "Give train_loader=: if the statistics fit those data, the data here have shifted.",
        output_error=errors[worst],
        output_error_in_eval=of.error_in_eval,
        by_chance=of.uncertainty(of.trained if trained else of.own),
        layers=len(layers),
    )


EXAMINERS = (shift,)
KINDS = (STALE, UNCLEAR)
