"""One call for all formats: CSV (RFC 4180), typed Parquet, and LaTeX."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from normkit import __version__
from normkit.core.atomic_write import atomic_write, write_text
from normkit.core.optional_dependencies import require
from normkit.errors import OptionError, UnknownName, nearest
from normkit.lab.experiment import Experiment
from normkit.lab.export import columns as kinds
from normkit.lab.export.columns import Column, comparison_columns, result_columns
from normkit.lab.export.latex import latex
from normkit.lab.results import Comparison, Result
from normkit.lab.statistics import compare

PER = ("run", "epoch", "comparison")
FORMATS = {"csv": ".csv", "parquet": ".parquet", "latex": ".tex"}  # and how files end


def write(
    experiment: Experiment,
    results: Mapping[str, Result],
    comparisons: Sequence[Comparison],
    path: str | Path,
    format: str | None = None,
    *,
    per: str = "run",
    failures: Collection[str] = (),
) -> Path:
    """Write results to a file that is complete or not there.

    Without a format the name of the file says it. ``per`` is "run", "epoch" or "comparison", for
    CSV and Parquet; ``comparisons`` are for LaTeX and for the last of these, and made if there are
    none. ``failures`` are the ids of runs that an error has ended.
    """
    format = format or _format_of(Path(path))
    if format not in FORMATS:
        raise UnknownName(f"Unknown format {format!r}. {nearest(format, FORMATS)}")
    if per not in PER:
        raise UnknownName(f"per got {per!r}. {nearest(per, PER)}")
    if format == "latex":
        if per != "run":
            raise OptionError(f"A LaTeX table cannot be per {per!r}. Try csv or parquet.")
        return write_text(path, latex(experiment, results, comparisons, failures=failures))
    columns = _columns(experiment, results, comparisons, per, failures)
    if format == "csv":
        return write_text(path, csv_text(columns))
    return atomic_write(path, lambda temporary: save_parquet(experiment, columns, temporary))


def rows(
    experiment: Experiment,
    results: Mapping[str, Result],
    per: str = "run",
    failures: Collection[str] = (),
) -> list[dict[str, Any]]:
    """The same as records, a dictionary a row."""
    columns = _columns(experiment, results, (), per, failures)
    values = zip(*(column.values for column in columns), strict=True)
    return [{c.name: v for c, v in zip(columns, row, strict=True)} for row in values]


def _columns(
    experiment: Experiment,
    results: Mapping[str, Result],
    comparisons: Sequence[Comparison],
    per: str,
    failures: Collection[str],
) -> list[Column]:
    if per == "comparison":
        found = comparisons or compare(experiment, results, failures)
        return comparison_columns(experiment, found)
    return result_columns(experiment, results, per, failures)


def _format_of(path: Path) -> str:
    for name, ending in FORMATS.items():
        if path.suffix.lower() == ending:
            return name
    raise OptionError(
        f"{path.name} does not say its format. Try a name that ends in one of "
        f"{', '.join(FORMATS.values())}, or give the format."
    )


def csv_text(columns: Sequence[Column]) -> str:
    """A heading and a line for each row. What is not known is empty; lists are JSON.

    >>> csv_text([Column("variant", "text", ["a, b"]), Column("score", "number", [0.5])])
    'variant,score\\r\\n"a, b",0.5\\r\\n'
    """
    text = io.StringIO()
    # with both characters in the line's end, fields that hold one of them are quoted
    writer = csv.writer(text, lineterminator="\r\n")
    writer.writerow([column.name for column in columns])
    for row in zip(*(column.values for column in columns), strict=True):
        writer.writerow([_csv_field(value) for value in row])
    return text.getvalue()


def _csv_field(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        # JSON has no NaN: a reader would stumble
        plain = [None if isinstance(v, float) and not math.isfinite(v) else v for v in value]
        return json.dumps(plain, separators=(",", ":"))
    return repr(value) if isinstance(value, float) else str(value)


def save_parquet(experiment: Experiment, columns: Sequence[Column], path: Path) -> None:
    """Write a file that says of itself what it holds: in its metadata are title and metric."""
    arrow = require("pyarrow", "lab", "Parquet")
    parquet = require("pyarrow.parquet", "lab", "Parquet")
    types = {
        kinds.TEXT: arrow.string(),
        kinds.INTEGER: arrow.int64(),
        kinds.NUMBER: arrow.float64(),
        kinds.FLAG: arrow.bool_(),
        kinds.INTEGERS: arrow.list_(arrow.int64()),
        kinds.NUMBERS: arrow.list_(arrow.float64()),
    }
    about = {
        "normkit": __version__,
        "experiment": experiment.name,
        "title": experiment.title,
        "scale": experiment.scale,
        "metric": experiment.metric,
    }
    fields = [arrow.field(column.name, types[column.kind]) for column in columns]
    arrays = []
    for column in columns:
        values = column.values
        if column.kind == kinds.NUMBER:  # arrow does not make real numbers of whole ones by itself
            values = [None if value is None else float(value) for value in values]
        arrays.append(arrow.array(values, type=types[column.kind]))
    schema = arrow.schema(fields, metadata=about)
    parquet.write_table(arrow.Table.from_arrays(arrays, schema=schema), path)
