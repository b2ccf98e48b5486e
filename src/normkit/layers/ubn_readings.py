"""Where the paper and the authors' code of unified batch normalization differ."""

from __future__ import annotations

from typing import Any

# The literal starts belong together: score 0 and variance 0 with the pair average would take
# running statistics at once and multiply activations by 1/√eps = 316.
READINGS: dict[str, dict[str, Any]] = {
    "recommended": {
        "score_norm": "pairs",
        "max_samples": 16,
        "score_init": 1.0,
        "var_init": 1.0,
        "update_in_eval": False,
        "train_stats": "batch",
        "stats_from": "calibrated",
        "gate": "after",
    },
    "paper": {
        "score_norm": "batch",
        "max_samples": None,
        "score_init": 0.0,
        "var_init": 0.0,
        "update_in_eval": False,
        "train_stats": "ema",
        "stats_from": "raw",
        "gate": "before",
    },
}
READINGS["authors"] = {**READINGS["recommended"], "update_in_eval": True}

CHOICES: dict[str, tuple[Any, ...]] = {
    "score_norm": ("pairs", "batch"),
    "train_stats": ("batch", "ema"),
    "stats_from": ("calibrated", "raw"),
    "gate": ("after", "before"),
    "update_in_eval": (False, True),
}

BY_PRESET: Any = "preset"
"""The default of every option above: whatever the preset says."""


def resolve(preset: str, asked: dict[str, Any]) -> dict[str, Any]:
    """The reading of a preset, with what was asked for explicitly laid over it."""
    explicit = {option: value for option, value in asked.items() if value != BY_PRESET}
    return {**READINGS.get(preset, READINGS["recommended"]), **explicit}
