"""One call for all formats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from normkit.core.atomic_write import atomic_write, write_text
from normkit.errors import OptionError, UnknownName, nearest
from normkit.lab.experiment import Experiment
from normkit.lab.export.comma_separated import csv_text
from normkit.lab.export.compared import comparison_table
from normkit.lab.export.latex import latex
from normkit.lab.export.parquet import save_parquet
from normkit.lab.export.tables import table
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
) -> Path:
    """Write results to a file that is complete or not there.

    Without a format the name of the file says it. ``per`` is "run", "epoch" or "comparison", for
    CSV and Parquet; ``comparisons`` are for LaTeX and for the last of these, and made if there are
    none.
    """
    format = format or _by_ending(Path(path))
    if format not in FORMATS:
        raise UnknownName(f"There is no format {format!r}. {nearest(format, FORMATS)}")
    if per not in PER:
        raise UnknownName(f"Rows cannot be per {per!r}. {nearest(per, PER)}")
    if format == "latex":
        if per != "run":
            raise OptionError(f"A LaTeX table cannot be per {per!r}. Try csv or parquet.")
        return write_text(path, latex(experiment, results, comparisons))
    if per == "comparison":
        made = comparison_table(experiment, comparisons or compare(experiment, results))
    else:
        made = table(experiment, results, per)
    if format == "csv":
        return write_text(path, csv_text(made))
    return atomic_write(path, lambda beside: save_parquet(experiment, made, beside))


def _by_ending(path: Path) -> str:
    found = [name for name, ending in FORMATS.items() if ending == path.suffix.lower()]
    if not found:
        endings = ", ".join(FORMATS.values())
        raise OptionError(
            f"{path.name} does not say its format. Try a name that ends in one of {endings}, or "
            "give the format."
        )
    return found[0]
