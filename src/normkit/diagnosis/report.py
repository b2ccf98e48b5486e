"""A diagnosis as one page that needs no network and runs no script; report.html arranges it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normkit.diagnosis.findings import bounds
from normkit.diagnosis.findings.examine import KINDS
from normkit.diagnosis.findings.finding import SEVERITIES, plural
from normkit.reporting import render
from normkit.reporting.charts import BarList, LineChart, Series, bar_list, heat_map, line_chart
from normkit.reporting.text import is_finite, number, percent

if TYPE_CHECKING:
    from normkit.diagnosis.diagnosis import Diagnosis

SHARES = 15  # of the gap


@dataclass(frozen=True)
class LayerMeasure:
    """How a measure of the layers is shown: in words, and with the bound that a finding has."""

    title: str
    about: str
    bound: float | None = None
    show: Callable[[float], str] = number
    below: bool = False  # whether small values are the bad ones
    logarithmic: bool = False


MEASURES = {
    "error_in_eval": LayerMeasure(
        "Output error in eval mode",
        "How far running statistics move the standardized output, whose own size is 1; with what "
        "comes from below.",
        bounds.OFF,
    ),
    "error": LayerMeasure(
        "Own output error",
        "The same with all norms below on batch statistics: what this layer does by itself.",
        bounds.OFF,
    ),
    "error_on_training": LayerMeasure(
        "Own output error on training data", "The same for the batches of the training.", bounds.OFF
    ),
    "condensation": LayerMeasure(
        "Similarity of samples",
        "Mean cosine between the samples of a batch; above 0.3 features are called condensed.",
        0.3,
    ),
    "beyond_6": LayerMeasure(
        "Values beyond six deviations",
        "Share of |x̂| > 6. With the right statistics it cannot be above 1/36 (Chebyshev).",
        1 / 36,
        percent,
    ),
    "dead": LayerMeasure(
        "Dead channels",
        "Share of channels that the activation never lets pass, in eval mode.",
        bounds.DEAD,
        percent,
    ),
    "saturated": LayerMeasure(
        "Saturated channels",
        "Share of channels that are at the bounds of the activation throughout.",
        bounds.MOSTLY,
        percent,
    ),
    "gradient_factor": LayerMeasure(
        "Gradient factor", "|γ| / √(variance + eps), mean over the channels: revisiting-bn, eq. 20."
    ),
    "largest_scale": LayerMeasure("Largest |γ|", "It starts at 1.", bounds.LARGE_SCALE),
    "independent_values": LayerMeasure(
        "Values behind the statistics of a batch",
        "How many independent values they are worth, from how much training batches differ.",
        bounds.FEW_VALUES,
        below=True,
        logarithmic=True,
    ),
    "stat_diff": LayerMeasure(
        "Difference of channels",
        "StatDiff of the channels that are normalized together: ws-bcn, eq. 35.",
    ),
    "under_represented": LayerMeasure(
        "Under-represented channels", "Share of channels that their group drowns.", None, percent
    ),
    "gate_saturation": LayerMeasure(
        "Saturated gates", "Share of gates below 0.05 or above 0.95.", bounds.MOSTLY, percent
    ),
}


def page(diagnosis: Diagnosis) -> str:
    """The whole page: no scripts, no fonts, nothing that is loaded."""
    return render(
        "report.html",
        Path(__file__).parent,
        what="The page of a diagnosis",
        title=f"Diagnosis of {diagnosis.model}",
        diagnosis=diagnosis,
        badges=_badges(diagnosis),
        summary=_summary(diagnosis),
        basis=_basis(diagnosis),
        kinds=KINDS,
        depth=_depth(diagnosis),
        bounds=bounds,
        gap=_gap(diagnosis),
        heat_maps=[
            (name, heat_map(cosines, f"Cosines between samples at {name}"))
            for path, cosines in diagnosis.cosines.items()
            for name in [path or "(model)"]
        ],
        measures=_measures(diagnosis),
    )


def _badges(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    """Tone and text."""
    counts = {s: sum(x.severity == s for x in diagnosis) for s in SEVERITIES}
    fine = [("fine", "no alarm")] if diagnosis.healthy else []
    return fine + [(s, f"{n} {plural(s, n)}") for s, n in counts.items() if n]


def _summary(diagnosis: Diagnosis) -> str:
    facts = diagnosis.facts
    kinds = ", ".join(f"{count} {kind}" for kind, count in facts.get("kinds", {}).items())
    parts = [
        f"{len(diagnosis.layers)} norms ({kinds})" if kinds else f"{len(diagnosis.layers)} norms",
        f"{facts.get('samples', 0):,} samples in {facts.get('batches', 0)} batches",
    ]
    if facts.get("training_samples"):
        parts.append(f"{facts['training_samples']:,} training samples")
    if facts.get("loss_eval") is not None:
        parts.append(
            f"loss {number(facts['loss_eval'])} in eval mode, {number(facts['loss_batch'])} with "
            "batch statistics"
        )
    return "; ".join(parts)


def _basis(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    """What was diagnosed, when and with what; as much of it as is known."""
    facts = diagnosis.facts
    versions = [f"{name} {facts[name]}" for name in ("normkit", "torch", "python") if name in facts]
    parameters = f", {facts['parameters']:,} parameters" if facts.get("parameters") else ""
    device = f", on {facts['device']}" if facts.get("device") else ""
    rows = [
        ("date", facts.get("date")),
        ("model", f"{facts['model']}{parameters}{device}" if facts.get("model") else None),
        ("data", facts.get("data")),
        ("first input", facts.get("input")),
        ("training data", facts.get("training_data")),
        ("versions", ", ".join(versions)),
    ]
    return [(name, value) for name, value in rows if value]


def _depth(diagnosis: Diagnosis) -> tuple[LineChart, LineChart] | None:
    """Output error and estimation shift, from the first to the last norm."""
    layers = [x for x in diagnosis.layers if "error_in_eval" in x.numbers or "error" in x.numbers]
    if not layers:
        return None
    names = [layer.path or "(model)" for layer in layers]

    def series(name: str, measure: str) -> Series:
        return Series(name, [layer.numbers.get(measure) for layer in layers])

    error = line_chart(
        [series("in eval mode", "error_in_eval"), series("own", "error")],
        names,
        label="Output error over depth, logarithmic",
        logarithmic=True,
        bounds=(bounds.OFF, bounds.WRONG),
    )
    shift = line_chart(
        [series("means", "esm_mean"), series("deviations", "esm_std")],
        names,
        label="Estimation shift magnitude over depth",
    )
    return error, shift


def _gap(diagnosis: Diagnosis) -> tuple[str, BarList | None] | None:
    """What there is to say about the gap, and where it enters if there is one."""
    gap = diagnosis.gap
    if gap is None:
        return None
    # one batch gives no standard error
    error = gap.standard_error
    sure = f" (standard error {number(error)})" if is_finite(error) else ""
    text = (
        f"The loss is {number(gap.eval_loss)} with running statistics and "
        f"{number(gap.train_loss)} with those of batches: a gap of {number(gap.gap)}{sure}."
    )
    if not gap.is_gap:
        return f"{text} That is no gap worth attributing.", None
    how = (
        "by the loss with norms switched one by one" if gap.method == "swap" else "by output error"
    )
    text += f" Shared out {how}."
    shares = list(gap.shares.items())
    if rest := shares[SHARES:]:
        text += f" {len(rest)} more norms have {percent(sum(share for _, share in rest))}."
    return text, bar_list(dict(shares[:SHARES]), show=percent)


def _measures(diagnosis: Diagnosis) -> list[dict[str, Any]]:
    cards = []
    for name, measure in MEASURES.items():
        values = {x.path: x.numbers[name] for x in diagnosis.layers if name in x.numbers}
        if any(values.values()):
            about = measure.about
            if measure.bound is not None:
                about += f" Dashed: {measure.show(measure.bound)}."
            bars = bar_list(
                values,
                bound=measure.bound,
                below=measure.below,
                logarithmic=measure.logarithmic,
                show=measure.show,
            )
            cards.append({"title": measure.title, "about": about, "bars": bars})
    return cards
