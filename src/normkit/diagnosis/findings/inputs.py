"""Data that are not those of training."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from normkit.core.moments import Moments
from normkit.diagnosis.batches import NO_TARGET
from normkit.diagnosis.findings.bounds import (
    ALIKE_RATIOS,
    FACTOR_OF_TWO,
    OFF,
    SURE,
    WRONG,
    average_error,
    sampling_error,
)
from normkit.diagnosis.findings.evidence import Evidence
from normkit.diagnosis.findings.finding import Finding, Kind, named
from normkit.diagnosis.findings.layer import Layer
from normkit.diagnosis.measures import output_error

SHIFTED = Kind(
    "input-shift",
    "The data are not distributed as those of training",
    "Running statistics describe the training data. Where the input differs, every norm shifts "
    "and scales its output wrongly, and the error grows with depth.",
    "Huang et al. 2022 (estimation-shift), section 4; Li et al. 2016 (AdaBN)",
)
SCALED = Kind(
    "wrong-input-scaling",
    "The input is on another scale than in training",
    "One factor explains the difference: pixels from 0 to 255 instead of 0 to 1, a standardization "
    "that is missing, or done twice. The first norm divides by a deviation that is not the data's.",
    "Huang et al. 2022 (estimation-shift), section 4; Davis & Frank 2021 (revisiting-bn), 3.4",
)
ADAPTING = "nk.adapt(model, loader, prior=0)"


def of_input(evidence: Evidence) -> Finding | None:
    """The input of the model against that of training."""
    assert evidence.train_data is not None
    known, seen = evidence.train_data.inputs, evidence.data.inputs
    if known is None or seen is None or known.mean.shape != seen.mean.shape:
        return None
    least = 1e-6 * float(known.var.mean())
    error = average_error(output_error(known, seen, max(least, 1e-30)))
    samples = min(sum(evidence.data.sizes), sum(evidence.train_data.sizes))
    if error < OFF or error < SURE * sampling_error(samples):
        return None
    factor = common_factor(known.var[0].sqrt(), seen.var[0].sqrt())
    numbers: dict[str, Any] = {
        "output_error": error,
        "mean": float(seen.mean.mean()),
        "mean_in_training": float(known.mean.mean()),
        "std": float(seen.var.mean().sqrt()),
        "std_in_training": float(known.var.mean().sqrt()),
    }
    where = [x.path for x in evidence.running() if x.error_in_eval >= OFF]
    facts = (
        f"mean {numbers['mean']:.3g} and deviation {numbers['std']:.3g}, in training "
        f"{numbers['mean_in_training']:.3g} and {numbers['std_in_training']:.3g}"
    )
    if factor is not None:
        back = _affine(known, seen, factor)
        return SCALED.found(
            "serious",
            where,
            f"The input has {facts}: a factor of {factor:.3g}.",
            worst="",
            remedy=_rescaled(evidence, back),
            factor=factor,
            **numbers,
        )
    fits = bool(evidence.running()) and not where  # as after an adaptation to these data
    return SHIFTED.found(
        "note" if fits else "serious" if error >= WRONG else evidence.severity(()),
        where,
        f"The input has {facts}: standardized as in training it is off by {error:.2f}.",
        worst="",
        remedy=ADAPTING,
        **numbers,
    )


def common_factor(known: Tensor, seen: Tensor) -> float | None:
    """The factor between deviations, if it is one for all channels and not between ½ and 2."""
    there = (known > 0) & (seen > 0)
    if not bool(there.any()):
        return None
    logs = (seen[there] / known[there]).log()
    middle = float(logs.median())
    spread = float(logs.quantile(0.75) - logs.quantile(0.25))
    return math.exp(middle) if abs(middle) >= FACTOR_OF_TWO and spread <= ALIKE_RATIOS else None


def _affine(known: Moments, seen: Moments, factor: float) -> str:
    """The code that brings inputs to the scale of training."""
    offset = float((known.mean - seen.mean / factor).mean())
    scale = float(known.var.mean().sqrt())
    scaled = f"x * {1 / factor:.4g}"
    sign = "+" if offset > 0 else "-"
    return scaled if abs(offset) < 0.1 * scale else f"{scaled} {sign} {abs(offset):.4g}"


def _rescaled(evidence: Evidence, code: str) -> str:
    """The code of batches of the form given, with inputs on the scale of training."""
    batch = evidence.batches[0]
    if not isinstance(batch.inputs, Tensor):
        return f"nk.calibrate(model, loader)  # or better, give the model {code}"
    return (
        f"loader = [{code} for x in loader]"
        if batch.target is NO_TARGET
        else f"loader = [({code}, y) for x, y in loader]"
    )


def scaled_layer(layer: Layer, evidence: Evidence) -> Finding | None:
    """Wrong scaling by what it does to the first norm: all deviations grow by one factor."""
    first = next((x for x in evidence.running() if x.learns), None)
    if layer is not first or layer.own is None or layer.own.expected.total is None:
        return None
    assert layer.kept is not None
    known, seen = layer.kept.var[0].double().clamp(min=0).sqrt(), layer.own.expected.total
    factor = common_factor(known, seen.var[0].to(known.device).sqrt())
    if factor is None:
        return None
    left = layer.distance(layer.kept, Moments(seen.mean / factor, seen.var / factor**2, seen.count))
    shifted = left >= OFF  # an offset as well, which cannot be told from what a norm is given
    return SCALED.found(
        "serious",
        [layer.path],
        f"What {named(layer.path)}, the first norm, is given deviates {factor:.3g} times as much "
        "as in training, in all channels alike"
        + (f"; divided by that it would still be off by {left:.2f}." if shifted else "."),
        remedy="nk.calibrate(model, loader)  # or better, standardize the input as in training"
        if shifted
        else _rescaled(evidence, f"x * {1 / factor:.4g}"),
        missing="Give train_loader= to compare the inputs themselves.",
        factor=factor,
        output_error=layer.error,
        output_error_scaled=left,
    )


def other_data(layers: list[Layer], evidence: Evidence) -> Finding:
    worst = max(layers, key=lambda layer: layer.error)
    return SHIFTED.found(
        evidence.severity(layers),
        [x.path for x in layers],
        f"The running statistics fit the training data, but on these data they put the output of "
        f"{named(worst.path)} off by {worst.error:.2f} (on training data "
        f"{worst.error_on_training:.2f}).",
        worst=worst.path,
        remedy=ADAPTING,
        output_error=worst.error,
        output_error_on_training=worst.error_on_training,
        first=layers[0].path,
        layers=len(layers),
    )


KINDS = (SHIFTED, SCALED)
