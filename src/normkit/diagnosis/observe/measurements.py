"""What was measured, as a table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor

from normkit.core.moments import Moments

MEASURES = {
    "esm_mean": "estimation shift magnitude of the means",
    "esm_std": "estimation shift magnitude of the standard deviations",
    "output_error": "mean square of what wrong statistics add to x̂, 1 being the signal",
    "stat_diff": "StatDiff of the channels that are normalized together, mean over the groups",
    "under_represented": "share of channels that their group drowns",
    "gradient_factor": "|γ| / √(σ² + ε), mean over the channels",
    "beyond_6": "share of |x̂| > 6",
    "dead": "share of channels that the activation never lets pass",
    "saturated": "share of channels that are at the bounds of the activation throughout",
    "gate_saturation": "share of gates below 0.05 or above 0.95",
    "frozen": "1 if a layer with a threshold is a fixed map at present",
    "frozen_share": "share of such layers that are; of the model, whose path is empty",
    "score": "running condensation score that the threshold is compared with",
    "condensation": "mean cosine between the samples of a batch",
    "condensation_matrix": "the cosines themselves: in ``matrices``, not in the table",
    "weight_drift": "root mean square of weight − start",
    "bias_drift": "root mean square of bias − start",
}


class Record(NamedTuple):
    """One number: which layer, which measure, how much."""

    path: str
    measure: str
    value: float


@dataclass(frozen=True, eq=False)
class Measurements:
    """A table layer × measure × value, layers in the order in which they run.

    ``value("layer1.0.bn1", "esm_mean")`` is one entry, ``by_layer("dead")`` a column. Beside the
    table: exact statistics of what each layer got, running ones, and values per channel. A measure
    that a layer has not is refused: ``why_not(path, measure)`` says why.
    """

    records: list[Record]
    batch_sizes: tuple[int, ...]
    inputs: dict[str, Moments] = field(default_factory=dict)  # (1, C), float64, per channel
    expected: dict[str, Moments] = field(default_factory=dict)  # (1, K), as the layer keeps them
    running: dict[str, Moments] = field(default_factory=dict)  # (1, K)
    channels: dict[str, dict[str, Tensor]] = field(default_factory=dict)  # (C,) on the CPU
    matrices: dict[str, Tensor] = field(default_factory=dict)  # cosines between samples
    calls: dict[str, int] = field(default_factory=dict)  # how often a layer ran, in all
    refused: dict[str, dict[str, str]] = field(default_factory=dict)  # reasons by path and measure

    @property
    def paths(self) -> tuple[str, ...]:
        """The layers that ran, in the order of their first call."""
        return tuple(self.calls)

    @property
    def samples(self) -> int:
        return sum(self.batch_sizes)

    @property
    def frozen_share(self) -> float | None:
        """The share of layers with a threshold that are a fixed map; None without such layers."""
        frozen = self.by_layer("frozen").values()
        return sum(frozen) / len(frozen) if frozen else None

    def value(self, path: str, measure: str) -> float | None:
        """One entry; None if the measure has no meaning for the layer: see ``why_not``."""
        return self._table.get((path, measure))

    def why_not(self, path: str, measure: str) -> str | None:
        """Why a layer has no value of a measure, such as "it has no gate"; None if it has one."""
        return self.refused.get(path, {}).get(measure)

    def by_layer(self, measure: str) -> dict[str, float]:
        """One measure for all layers that have it."""
        return {r.path: r.value for r in self.records if r.measure == measure}

    def by_measure(self, path: str) -> dict[str, float]:
        """All measures of one layer."""
        return {r.measure: r.value for r in self.records if r.path == path}

    def to_rows(self) -> list[dict[str, Any]]:
        """One dictionary a number."""
        return [record._asdict() for record in self.records]

    def __iter__(self) -> Iterator[Record]:
        return iter(self.records)

    def __len__(self) -> int:
        return len(self.records)

    @cached_property
    def _table(self) -> dict[tuple[str, str], float]:
        return {(r.path, r.measure): r.value for r in self.records}

    def __repr__(self) -> str:
        return f"<Measurements of {len(self.paths)} norms on {self.samples} samples>"
