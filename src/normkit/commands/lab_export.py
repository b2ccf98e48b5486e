"""Write the results of an experiment for other programs.

csv and parquet have a row for each run, for each epoch of each run, or for each comparison with
the baseline: every number behind a verdict. latex is a table as in the papers: mean ± standard
deviation, bold if significant, the best underlined."""

from __future__ import annotations

import argparse
from pathlib import Path

from normkit.commands import lab_subject, outputs
from normkit.commands.screen import console
from normkit.lab import export
from normkit.lab.statistics import compare
from normkit.lab.store import Reader

NAME = "export"
HELP = "results as CSV, Parquet or a LaTeX table"
EXAMPLES = f"""\
examples:
  normkit lab export my.toml --format csv
  normkit lab export my.toml --format parquet --per epoch
  normkit lab export my.toml --per comparison
  normkit lab export my.toml --format latex --out table.tex

{lab_subject.WHERE}"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    lab_subject.add_experiment(parser)
    add = parser.add_argument
    add("--format", choices=export.FORMATS, default="csv", help="default csv")
    add("--per", choices=export.PER, default="run", help="a row for each (default run)")
    add("--out", type=Path, metavar="FILE", help="default: beside the results")
    add("--force", action="store_true", help="overwrite the file")


def run(options: argparse.Namespace) -> int:
    experiment = lab_subject.experiment_of(options)
    path = lab_subject.store_of(options, experiment)
    ending = export.FORMATS[options.format]
    out = options.out or lab_subject.beside(path, experiment, ending, options.metric)
    with Reader(path) as store:
        outputs.check([out], options.force or options.out is None)
        results = store.results(run.id for run in experiment.runs())
    comparisons = compare(experiment, results) if options.format == "latex" else []
    export.write(experiment, results, comparisons, out, options.format, per=options.per)
    console().print(f"Written: {out}", markup=False, soft_wrap=True)
    return 0
