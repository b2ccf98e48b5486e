"""Records of an observation in files."""

from __future__ import annotations

import csv
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from normkit.errors import OptionError


class Observed(NamedTuple):
    """One number: at which step, of which layer ("" for the model), which measure, how much."""

    step: int
    path: str
    measure: str
    value: float


def save(records: Sequence[Observed], path: str | Path) -> None:
    """Write records to a .csv or .parquet file, one row a number."""
    path = Path(path)
    if path.suffix in (".csv", ".parquet"):  # a training is not to be lost for want of a directory
        path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(Observed._fields)
            writer.writerows(records)
    elif path.suffix == ".parquet":
        arrow = _pyarrow()
        columns = {name: [row[i] for row in records] for i, name in enumerate(Observed._fields)}
        arrow.parquet.write_table(arrow.table(columns), path)
    else:
        raise OptionError(f"Records are saved as .csv or .parquet, got {path.name!r}.")


def _pyarrow() -> Any:
    try:
        importlib.import_module("pyarrow.parquet")
        return importlib.import_module("pyarrow")
    except ImportError as error:
        raise OptionError(
            "Parquet needs pyarrow. Try pip install 'normkit[lab]', or a .csv file."
        ) from error
