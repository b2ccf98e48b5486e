"""Columns as Parquet, typed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from normkit import __version__
from normkit.lab.experiment import Experiment
from normkit.lab.export import columns as kind
from normkit.lab.export.columns import Column
from normkit.models import require


def save_parquet(experiment: Experiment, columns: Sequence[Column], path: Path) -> None:
    """Write a file that says of itself what it holds: in its metadata are title and metric."""
    arrow = require("pyarrow", "lab", "Parquet")
    parquet = require("pyarrow.parquet", "lab", "Parquet")
    kinds = {
        kind.TEXT: arrow.string(),
        kind.INTEGER: arrow.int64(),
        kind.NUMBER: arrow.float64(),
        kind.FLAG: arrow.bool_(),
        kind.INTEGERS: arrow.list_(arrow.int64()),
        kind.NUMBERS: arrow.list_(arrow.float64()),
    }
    fields = [arrow.field(column.name, kinds[column.kind]) for column in columns]
    about = {
        "normkit": __version__,
        "experiment": experiment.name,
        "title": experiment.title,
        "scale": experiment.scale,
        "metric": experiment.metric,
    }
    schema = arrow.schema(fields, metadata=about)
    arrays = [arrow.array(_plain(column), type=kinds[column.kind]) for column in columns]
    parquet.write_table(arrow.Table.from_arrays(arrays, schema=schema), path)


def _plain(column: Column) -> list[Any]:
    """Whole numbers among real ones become real: arrow does not do that by itself."""
    if column.kind == kind.NUMBER:
        return [None if value is None else float(value) for value in column.values]
    return column.values
