"""Dropout in front of a norm."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import nn

from normkit.diagnosis.findings.bounds import FITS, OFF
from normkit.diagnosis.findings.evidence import Evidence
from normkit.diagnosis.findings.finding import Finding, Kind, named, places
from normkit.diagnosis.findings.known import Known
from normkit.diagnosis.findings.looking import look

DROPOUT = Kind(
    "dropout-before-norm",
    "Dropout in front of a norm changes its variance",
    "Dropout keeps the mean and raises the variance, in training only. Running statistics hold the "
    "raised one; in eval mode, without dropout, the norm divides by too much.",
    "Li et al. 2019, Understanding the disharmony between dropout and batch normalization",
    spoils=True,
)


def dropout(evidence: Evidence, known: Known) -> Iterator[Finding]:
    """Running statistics that fit with dropout, and do not without."""
    drops = {
        path: module
        for path, module in evidence.model.named_modules()
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0
    }
    suspects = [
        x
        for x in evidence.running()
        if x.learns and x.path not in known.spoiled and not x.fits(2 * FITS)
    ]
    if not drops or not suspects:
        return
    free = [x.norm for x in evidence.layers if x.learns and x.pools]
    with_drops = look(
        evidence.model,
        evidence.survey,
        [batch for batch in evidence.batches if batch.size > 1],
        on_batch=free,
        awake=drops.values(),
    )
    errors = {x: x.error_on(with_drops.traffic.get(x.path)) for x in suspects}
    told = [x for x in suspects if errors[x] < x.error / 2]
    if not told:
        return
    worst = max(told, key=lambda layer: layer.error)
    assert worst.kept is not None and worst.own is not None
    assert worst.own.expected.total is not None
    var = worst.own.expected.total.var.to(worst.kept.var.device)
    ratio = float((worst.kept.var.double() / var.clamp(min=1e-30)).median())
    yield DROPOUT.found(
        "warning" if worst.error >= OFF / 2 else "note",
        [x.path for x in told],
        f"The running statistics of {places([x.path for x in told])} fit the data with dropout "
        f"(off by {errors[worst]:.2f}) and not without it ({worst.error:.2f}): the variance kept "
        f"by {named(worst.path)} is {ratio:.1f} times that of eval mode.",
        worst=worst.path,
        remedy=f"[setattr(model.get_submodule(p), 'p', 0.0) for p in {list(drops)!r}]; "
        f"{evidence.calibrating}  # and move dropout behind the last norm",
        output_error=worst.error,
        output_error_with_dropout=errors[worst],
        variance_ratio=ratio if math.isfinite(ratio) else None,
        layers=len(told),
    )


EXAMINERS = (dropout,)
KINDS = (DROPOUT,)
