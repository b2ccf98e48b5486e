"""What findings about statistics at their start have in common."""

from __future__ import annotations

import math
from collections.abc import Sequence

from normkit.diagnosis.findings.evidence import Evidence
from normkit.diagnosis.findings.finding import Finding, Kind, named, places
from normkit.diagnosis.findings.layer import Layer

AT_START = "mean 0 and variance 1"
STANDSTILL = "A norm in eval mode then only rescales: what training normalized is not normalized."


def at_start(
    kind: Kind,
    layers: Sequence[Layer],
    evidence: Evidence,
    verb: str,
    remedy: str,
    severity: str = "serious",
    because: str = "",
    missing: str = "",
) -> Finding:
    paths = [layer.path for layer in layers]
    errors = {x.path: x.error for x in layers if not math.isnan(x.error)}
    worst = max(errors, key=lambda path: errors[path]) if errors else paths[0]
    gap = evidence.gap
    count = max((x.count or 0 for x in layers), default=0)
    after = f" after {count} batches" if count else ""
    values = AT_START if all(x.at_start for x in layers) else "values that do not fit"
    return kind.found(
        severity,
        paths,
        f"The statistics of {places(paths)} {verb} at {values}{after}{because}; on the data they "
        f"put the output of {named(worst)} off by {errors.get(worst, math.nan):.2f}, where 1 is "
        "the size of the output itself.",
        worst=worst,
        remedy=remedy,
        missing=missing,
        output_error=errors.get(worst),
        batches_counted=count,
        layers=len(layers),
        loss_eval=None if gap is None else gap.eval,
        loss_batch=None if gap is None else gap.batch,
    )
