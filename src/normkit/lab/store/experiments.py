"""What an experiment asked for, as a store keeps it: read without the file it came from."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from normkit.lab.experiment import Cell, Experiment, variant_label


@dataclass(frozen=True)
class StoredVariant:
    """A variant in a cell, and its runs in the order of the seeds."""

    name: str
    cell: Cell
    runs: tuple[str, ...]  # ids

    @property
    def label(self) -> str:
        return variant_label(self.name, self.cell)


@dataclass(frozen=True)
class StoredExperiment:
    """An experiment at the time when it was run."""

    name: str
    title: str
    scale: str
    metric: str
    baseline: str
    seeds: tuple[int, ...]
    variants: tuple[StoredVariant, ...]
    text: str = ""  # of the file
    overrides: tuple[str, ...] = ()  # --set
    higher_is_better: bool = True  # of the metric
    percent: bool = True
    saved: str = ""  # UTC; when it was last asked for

    @classmethod
    def of(cls, experiment: Experiment, text: str = "") -> StoredExperiment:
        variants = tuple(
            StoredVariant(
                variant.name,
                variant.cell,
                tuple(run.id for run in variant.runs(experiment.seeds)),
            )
            for variant in experiment.variants
        )
        about = experiment.metrics[experiment.metric]
        return cls(
            experiment.name,
            experiment.title,
            experiment.scale,
            experiment.metric,
            experiment.baseline,
            experiment.seeds,
            variants,
            text,
            experiment.overrides,
            about.higher_is_better,
            about.percent,
        )

    def to_json(self) -> str:
        record = dataclasses.asdict(self)
        del record["saved"]  # asked for twice, it is one
        return json.dumps(record, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str, saved: str = "") -> StoredExperiment:
        record: dict[str, Any] = json.loads(text)
        variants = tuple(
            StoredVariant(
                each["name"],
                tuple((path, _hashable(value)) for path, value in each["cell"]),
                tuple(each["runs"]),
            )
            for each in record.pop("variants")
        )
        for key in ("seeds", "overrides"):
            record[key] = tuple(record[key])
        return cls(**record, variants=variants, saved=saved)


def _hashable(value: Any) -> Any:
    """Lists of JSON as the tuples that they were."""
    return tuple(map(_hashable, value)) if isinstance(value, list) else value
