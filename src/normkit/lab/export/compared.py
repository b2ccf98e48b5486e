"""Comparisons as columns: what a reviewer would recompute."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from normkit.lab.experiment import Experiment
from normkit.lab.export.columns import INTEGER, NUMBER, TEXT, Column, fitting
from normkit.lab.results import Comparison

KINDS = {"str": TEXT, "int": INTEGER, "int | None": INTEGER}  # and whatever else is a number


def comparison_table(experiment: Experiment, comparisons: Sequence[Comparison]) -> list[Column]:
    """A row for each comparison, with every number behind its verdict."""
    axes = dict.fromkeys(path for each in comparisons for path, _ in each.cell)
    fields = [field for field in dataclasses.fields(Comparison) if field.name != "cell"]
    return [
        Column("experiment", TEXT, [experiment.name] * len(comparisons)),
        Column("scale", TEXT, [experiment.scale] * len(comparisons)),
        Column("metric", TEXT, [experiment.metric] * len(comparisons)),
        *(fitting(axis, [dict(each.cell).get(axis) for each in comparisons]) for axis in axes),
        *(
            Column(
                field.name,
                KINDS.get(str(field.type), NUMBER),
                [_known(getattr(each, field.name)) for each in comparisons],
            )
            for field in fields
        ),
    ]


def _known(value: Any) -> Any:
    """NaN is a number that a test with too few seeds could not give."""
    return None if isinstance(value, float) and math.isnan(value) else value
