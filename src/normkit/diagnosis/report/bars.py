"""Lists of bars, one a layer: readable at any width."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from normkit.diagnosis.findings import bounds
from normkit.diagnosis.report.text import breaking, escaped, number, percent


@dataclass(frozen=True)
class Measure:
    """How a measure is shown: in words, and with the bound that a finding has."""

    title: str
    about: str
    bound: float | None = None
    show: Callable[[float], str] = number
    below: bool = False  # whether small values are the bad ones
    logarithmic: bool = False


MEASURES = {
    "error_in_eval": Measure(
        "Output error in eval mode",
        "How far running statistics move the standardized output, whose own size is 1; with what "
        "comes from below.",
        bounds.OFF,
    ),
    "error": Measure(
        "Own output error",
        "The same with all norms below on batch statistics: what this layer does by itself.",
        bounds.OFF,
    ),
    "error_on_training": Measure(
        "Own output error on training data", "The same for the batches of the training.", bounds.OFF
    ),
    "condensation": Measure(
        "Similarity of samples",
        "Mean cosine between the samples of a batch; above 0.3 features are called condensed.",
        0.3,
    ),
    "beyond_6": Measure(
        "Values beyond six deviations",
        "Share of |x̂| > 6. With the right statistics it cannot be above 1/36 (Chebyshev).",
        1 / 36,
        percent,
    ),
    "dead": Measure(
        "Dead channels",
        "Share of channels that the activation never lets pass, in eval mode.",
        bounds.DEAD,
        percent,
    ),
    "saturated": Measure(
        "Saturated channels",
        "Share of channels that are at the bounds of the activation throughout.",
        bounds.MOSTLY,
        percent,
    ),
    "gradient_factor": Measure(
        "Gradient factor", "|γ| / √(variance + eps), mean over the channels: revisiting-bn, eq. 20."
    ),
    "largest_scale": Measure("Largest |γ|", "It starts at 1.", bounds.LARGE_SCALE),
    "independent_values": Measure(
        "Values behind the statistics of a batch",
        "How many independent values they are worth, from how much training batches differ.",
        bounds.FEW_VALUES,
        below=True,
        logarithmic=True,
    ),
    "stat_diff": Measure(
        "Difference of channels",
        "StatDiff of the channels that are normalized together: ws-bcn, eq. 35.",
    ),
    "under_represented": Measure(
        "Under-represented channels", "Share of channels that their group drowns.", None, percent
    ),
    "gate_saturation": Measure(
        "Saturated gates", "Share of gates below 0.05 or above 0.95.", bounds.MOSTLY, percent
    ),
}


def bars(measure: Measure, values: Mapping[str, float]) -> str:
    """A card with a bar for each layer."""
    finite = [v for v in values.values() if math.isfinite(v)]
    bound = measure.bound
    most = max([*finite, *([bound] if bound is not None else []), 1e-30])
    length = _log_length(most) if measure.logarithmic else lambda v: v / most
    mark = (
        ""
        if bound is None
        else f'<span class="mark" style="left:{100 * _clipped(length(bound)):.1f}%"></span>'
    )
    rows = []
    for path, value in values.items():
        bad = bound is not None and (value < bound if measure.below else not value <= bound)
        share = _clipped(length(value)) if math.isfinite(value) else 1.0
        rows.append(
            f'<span class="path">{breaking(path or "(model)")}</span>'
            f'<span class="track"><span class="bar{" over" if bad else ""}" '
            f'style="display:block;width:{100 * share:.1f}%"></span>{mark}</span>'
            f'<span class="value">{measure.show(value)}</span>'
        )
    bounded = "" if bound is None else f" Dashed: {measure.show(bound)}."
    return (
        f'<section class="card"><h3>{escaped(measure.title)}</h3>'
        f'<p class="soft small">{escaped(measure.about + bounded)}</p>'
        f'<div class="rows">{"".join(rows)}</div></section>'
    )


def _log_length(most: float) -> Callable[[float], float]:
    span = math.log10(max(most, 10.0))
    return lambda value: math.log10(max(value, 1.0)) / span


def _clipped(share: float) -> float:
    return min(max(share, 0.0), 1.0)
