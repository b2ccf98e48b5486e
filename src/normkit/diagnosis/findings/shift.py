"""Running statistics that do not fit the data: old ones, dropout, or other data."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from normkit.core.moments import Moments
from normkit.diagnosis.findings.bounds import (
    ALIKE_RATIOS,
    FACTOR_OF_TWO,
    FITS,
    OFF,
    SURE,
    WRONG,
    average_error,
    sampling_error,
)
from normkit.diagnosis.findings.evidence import Evidence
from normkit.diagnosis.findings.finding import EarlierFindings, Finding, Kind, named, places
from normkit.diagnosis.findings.norm import NormEvidence
from normkit.diagnosis.measures import output_error
from normkit.diagnosis.observe.passes import run_pass
from normkit.inspection.batches import NO_TARGET

ADAPTING = "nk.adapt(model, loader, prior=0)"
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
    brings=("eps-dominates", "dead-channels", "train-eval-gap"),
)
DROPOUT = Kind(
    "dropout-before-norm",
    "Dropout in front of a norm changes its variance",
    "Dropout keeps the mean and raises the variance, in training only. Running statistics hold the "
    "raised one; in eval mode, without dropout, the norm divides by too much.",
    "Li et al. 2019, Understanding the disharmony between dropout and batch normalization",
    spoils=True,
)


def estimation_shift(evidence: Evidence, earlier: EarlierFindings) -> Iterator[Finding]:
    layers = [x for x in evidence.running() if x.learns and x.path not in earlier.spoiled]
    layers = [x for x in layers if x.error_in_eval >= OFF]  # wrong however norms below are set
    off = [x for x in layers if _is_off(x.error, x.uncertainty(x.own))]
    if evidence.trained is None:  # not given, or batch statistics cannot be had
        if off:
            yield scaled_layer(off[0], evidence) or _off(UNCLEAR, off, evidence)
        return
    old = [x for x in layers if _is_off(x.error_on_training, x.uncertainty(x.trained))]
    if old:
        yield _off(STALE, old, evidence)
    elif (finding := of_input(evidence)) is not None:
        yield finding
    elif off:
        yield other_data(off, evidence)


def _is_off(error: float, by_chance: float) -> bool:
    """Whether an error is large, and no accident of a small sample."""
    return error >= OFF and error > SURE * by_chance


def _off(kind: Kind, layers: list[NormEvidence], evidence: Evidence) -> Finding:
    trained = kind is STALE
    errors = {x: x.error_on_training if trained else x.error for x in layers}
    worst = max(layers, key=lambda layer: errors[layer])
    data = "training data" if trained else "data"
    return kind.finding(
        evidence.severity(layers),
        layers,
        f"The running statistics of {places(layers)} do not fit the {data}: they put the output of "
        f"{named(worst.path)} off by {errors[worst]:.2f}, where 1 is the size of the output itself"
        f" ({worst.error_in_eval:.2f} in eval mode, with what comes from below).",
        worst=worst,
        remedy=evidence.repairing,
        missing=""
        if trained
        else "Give train_loader=: if the statistics fit those data, the data here have shifted.",
        output_error=errors[worst],
        output_error_in_eval=worst.error_in_eval,
        by_chance=worst.uncertainty(worst.trained if trained else worst.own),
        layers=len(layers),
    )


def of_input(evidence: Evidence) -> Finding | None:
    """The input of the model against that of training."""
    assert evidence.train_data is not None
    usual, seen = evidence.train_data.inputs, evidence.data.inputs
    if usual is None or seen is None or usual.mean.shape != seen.mean.shape:
        return None
    least = 1e-6 * float(usual.var.mean())
    error = average_error(output_error(usual, seen, max(least, 1e-30)))
    samples = min(sum(evidence.data.sizes), sum(evidence.train_data.sizes))
    if error < OFF or error < SURE * sampling_error(samples):
        return None
    factor = common_factor(usual.var[0].sqrt(), seen.var[0].sqrt())
    numbers: dict[str, Any] = {
        "output_error": error,
        "mean": float(seen.mean.mean()),
        "mean_in_training": float(usual.mean.mean()),
        "std": float(seen.var.mean().sqrt()),
        "std_in_training": float(usual.var.mean().sqrt()),
    }
    where = [x for x in evidence.running() if x.error_in_eval >= OFF]
    facts = (
        f"mean {numbers['mean']:.3g} and deviation {numbers['std']:.3g}, in training "
        f"{numbers['mean_in_training']:.3g} and {numbers['std_in_training']:.3g}"
    )
    if factor is not None:
        return SCALED.finding(
            "serious",
            where,
            f"The input has {facts}: a factor of {factor:.3g}.",
            worst="",
            remedy=_rescaled(evidence, _affine(usual, seen, factor)),
            factor=factor,
            **numbers,
        )
    fits = bool(evidence.running()) and not where  # as after an adaptation to these data
    return SHIFTED.finding(
        "note" if fits else "serious" if error >= WRONG else evidence.severity(()),
        where,
        f"The input has {facts}: standardized as in training it is off by {error:.2f}.",
        worst="",
        remedy=ADAPTING,
        **numbers,
    )


def common_factor(usual: Tensor, seen: Tensor) -> float | None:
    """The factor between deviations, if it is one for all channels and not between ½ and 2."""
    there = (usual > 0) & (seen > 0)
    if not bool(there.any()):
        return None
    logs = (seen[there] / usual[there]).log()
    middle = float(logs.median())
    spread = float(logs.quantile(0.75) - logs.quantile(0.25))
    return math.exp(middle) if abs(middle) >= FACTOR_OF_TWO and spread <= ALIKE_RATIOS else None


def _affine(usual: Moments, seen: Moments, factor: float) -> str:
    """The code that brings inputs to the scale of training."""
    offset = float((usual.mean - seen.mean / factor).mean())
    scale = float(usual.var.mean().sqrt())
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


def scaled_layer(layer: NormEvidence, evidence: Evidence) -> Finding | None:
    """Wrong scaling by what it does to the first norm: all deviations grow by one factor."""
    first = next((x for x in evidence.running() if x.learns), None)
    if layer is not first or layer.own is None or layer.own.expected.total is None:
        return None
    assert layer.kept is not None
    usual, seen = layer.kept.var[0].double().clamp(min=0).sqrt(), layer.own.expected.total
    factor = common_factor(usual, seen.var[0].to(usual.device).sqrt())
    if factor is None:
        return None
    left = layer.distance(layer.kept, Moments(seen.mean / factor, seen.var / factor**2, seen.count))
    shifted = left >= OFF  # an offset as well, which cannot be told from what a norm is given
    return SCALED.finding(
        "serious",
        [layer],
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


def other_data(layers: list[NormEvidence], evidence: Evidence) -> Finding:
    worst = max(layers, key=lambda layer: layer.error)
    return SHIFTED.finding(
        evidence.severity(layers),
        layers,
        f"The running statistics fit the training data, but on these data they put the output of "
        f"{named(worst.path)} off by {worst.error:.2f} (on training data "
        f"{worst.error_on_training:.2f}).",
        worst=worst,
        remedy=ADAPTING,
        output_error=worst.error,
        output_error_on_training=worst.error_on_training,
        first=layers[0].path,
        layers=len(layers),
    )


def dropout_before_norm(evidence: Evidence, earlier: EarlierFindings) -> Iterator[Finding]:
    """Running statistics that fit with dropout, and do not without."""
    drops = {
        path: module
        for path, module in evidence.model.named_modules()
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0
    }
    unexplained = [x for x in evidence.running() if x.learns and x.path not in earlier.spoiled]
    suspects = [x for x in unexplained if not x.fits(2 * FITS)]
    if not drops or not suspects:
        return
    free = [x.norm for x in evidence.layers if x.learns and x.pools]
    with_drops = run_pass(
        evidence.model,
        evidence.survey,
        [batch for batch in evidence.batches if batch.size > 1],
        on_batch=free,
        training=drops.values(),
    )
    errors = {x: x.error_on(with_drops.norms.get(x.path)) for x in suspects}
    explained = [x for x in suspects if errors[x] < x.error / 2]
    if not explained:
        return
    worst = max(explained, key=lambda layer: layer.error)
    assert worst.kept is not None and worst.own is not None
    assert worst.own.expected.total is not None
    var = worst.own.expected.total.var.to(worst.kept.var.device)
    ratio = float((worst.kept.var.double() / var.clamp(min=1e-30)).median())
    yield DROPOUT.finding(
        "warning" if worst.error >= OFF / 2 else "note",
        explained,
        f"The running statistics of {places(explained)} fit the data with dropout "
        f"(off by {errors[worst]:.2f}) and not without it ({worst.error:.2f}): the variance kept "
        f"by {named(worst.path)} is {ratio:.1f} times that of eval mode.",
        worst=worst,
        remedy=f"[setattr(model.get_submodule(p), 'p', 0.0) for p in {list(drops)!r}]; "
        f"{evidence.calibrating}  # and move dropout behind the last norm",
        output_error=worst.error,
        output_error_with_dropout=errors[worst],
        variance_ratio=ratio if math.isfinite(ratio) else None,
        layers=len(explained),
    )
