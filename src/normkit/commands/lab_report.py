"""Show the answer of an experiment, and write it as a page: one HTML file that needs no network.

Nothing is trained. A page of an experiment that is still running says what is missing."""

from __future__ import annotations

import argparse
from pathlib import Path

from normkit.commands import lab_subject
from normkit.commands.lab_answer import show
from normkit.lab.store import Reader

NAME = "report"
HELP = "show the answer, and write it as a page"
EXAMPLES = f"""\
examples:
  normkit lab report my.toml
  normkit lab report my.toml --scale paper --out answer.html
  normkit lab report my.toml --metric top5_error

{lab_subject.WHERE}"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    lab_subject.add_experiment(parser)
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="the page (default: beside the results)"
    )


def run(options: argparse.Namespace) -> int:
    experiment = lab_subject.experiment_of(options)
    path = lab_subject.store_of(options, experiment)
    with Reader(path) as store:
        page = lab_subject.beside(path, experiment, ".html", options.metric)
        show(experiment, store, options.out or page)
    return 0
