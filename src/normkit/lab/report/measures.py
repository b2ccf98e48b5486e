"""What can be watched in training, and how it is called."""

from __future__ import annotations

from typing import NamedTuple

from normkit.diagnosis.disturbance import DELTAS

DEPTH = "norm, in the order of the forward pass"


class Measure(NamedTuple):
    """How a measure is shown. The entries of a list are layers, unless ``over`` says otherwise."""

    title: str
    about: str
    entries: str = DEPTH
    over: tuple[float, ...] = ()


MEASURES = {
    "condensation": Measure(
        "Feature condensation",
        "Mean cosine between the samples of a fixed batch, before the first norm. Above 0.3 "
        "features are called condensed (UBN).",
    ),
    "esm_mean": Measure(
        "Estimation shift of the means",
        "Distance between running means and the means of the test data (estimation shift).",
    ),
    "esm_std": Measure(
        "Estimation shift of the deviations",
        "Distance between running deviations and those of the test data (estimation shift).",
    ),
    "stat_diff": Measure(
        "Difference of channels",
        "Spread of the channels' means over their mean deviation, in a group (WS and BCN).",
    ),
    "gradient_factor": Measure(
        "Gradient factor",
        "|γ| / √(variance + eps): what a norm multiplies gradients with (revisiting BN).",
    ),
    "disturbance": Measure(
        "Accuracy with disturbed statistics",
        "The running statistics of the first norms of six blocks were made wrong at random "
        "(estimation shift).",
        "largest relative error",
        (0.0, *DELTAS),
    ),
    "gate_saturation": Measure("Saturated gates", "Share of gates below 0.05 or above 0.95."),
    "frozen": Measure(
        "Frozen norms", "1 for each ubn that is a fixed map at present, 0 for others."
    ),
    "ws_gradients_a": Measure(
        "Gradient that weight standardization removes by dividing",
        "Of each standardized weight, in the order of the forward pass (WS and BCN).",
        "weight",
    ),
    "ws_gradients_b": Measure(
        "Gradient that weight standardization removes by centring",
        "Of each standardized weight, in the order of the forward pass (WS and BCN).",
        "weight",
    ),
    "ws_gradients_c": Measure(
        "Gradient that weight standardization leaves",
        "Of each standardized weight, in the order of the forward pass (WS and BCN).",
        "weight",
    ),
}
