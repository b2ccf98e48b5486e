"""What a conversion did to the output of a model, measured."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any

import torch

# Relative to the largest number of the output. What is summed in another order differs by a few
# units in the last place, and a deep model makes some hundred of them out of that.
ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5}


def rounding(dtype: torch.dtype) -> float:
    """The relative difference up to which two results of a type count as equal but for rounding."""
    return ROUNDING.get(dtype) or 4 * torch.finfo(dtype).eps


@dataclass(frozen=True)
class Certificate:
    """The evidence: every number in it was measured, in eval mode, before and after."""

    title: str
    converted: int
    """How many norms were replaced."""
    probe: str
    """The input that was used, or why there was none."""
    probed: bool
    dtype: str = ""
    """The number type of the output."""
    difference: float | None = None
    """Of the model's output: max |after − before| / max |before|; None if not measured."""
    layers: dict[str, float] = field(default_factory=dict)
    """Of each new layer, on the input that the old one got: the same measure."""
    unreached: tuple[str, ...] = ()
    """Converted layers that the model did not call; they were compared on random numbers."""
    tolerance: float = 0.0
    """What still counts as rounding."""
    notes: tuple[str, ...] = ()

    @property
    def exact(self) -> bool:
        """Whether the model and each layer gave the same as before but for rounding."""
        return self.probed and self.layers_exact and self._within(self.difference)

    @property
    def layers_exact(self) -> bool:
        """Whether each layer alone did, on the input that the old one got."""
        measured = self.probed and len(self.layers) == self.converted
        return measured and all(map(self._within, self.layers.values()))

    @property
    def worst(self) -> tuple[str, float] | None:
        """The layer that differs most."""
        return max(self.layers.items(), key=lambda item: item[1], default=None)

    @property
    def note(self) -> str:
        return " ".join(self.notes)

    def _within(self, difference: float | None) -> bool:
        return difference is not None and difference <= self.tolerance

    @property
    def verdict(self) -> str:
        """One sentence."""
        if not self.probed:
            return f"Not measured: {self.probe.rstrip('.')}."
        if self.exact:
            return f"Exact to rounding: the output differs by {self.difference:.1e} relative."
        said = (
            "The output has no numbers to compare"
            if self.difference is None
            else f"The output differs by {self.difference:.1e} relative"
        )
        if not self.layers:
            return f"{said}."
        if self.layers_exact:
            return f"{said}, though each layer alone is exact to rounding."
        assert self.worst is not None
        return f"{said}; the layer that differs most is {self.worst[0]} ({self.worst[1]:.1e})."

    def __str__(self) -> str:
        lines = [f"{self.title}: {self.converted} norm(s) converted. {self.verdict}"]
        if self.probed:
            lines.append(f"Measured in eval mode with {self.probe}, {self.dtype}.")
        if self.unreached:
            lines.append(
                f"Not called for this input, and measured with random numbers: "
                f"{', '.join(self.unreached)}."
            )
        return "\n".join([*lines, *self.notes])

    def to_dict(self) -> dict[str, Any]:
        """Everything, in plain values; differences that are not finite become words."""
        return {
            "title": self.title,
            "converted": self.converted,
            "exact": self.exact,
            "verdict": self.verdict,
            "probed": self.probed,
            "probe": self.probe,
            "dtype": self.dtype,
            "difference": _plain(self.difference),
            "tolerance": self.tolerance,
            "layers": {path: _plain(value) for path, value in self.layers.items()},
            "unreached": list(self.unreached),
            "notes": list(self.notes),
        }

    def to_json(self, indent: int | None = 2) -> str:
        return json.dumps(self.to_dict(), indent=indent)


def _plain(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(value)
