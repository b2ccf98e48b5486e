"""Five normalizers compared on small images of digits: with 64 images a worker, and with two.

Fifty small networks are trained, on as many cores as there are; it takes a few minutes. Then
paired statistics say which norms hold when each worker sees only two images."""

from __future__ import annotations

import argparse
from importlib.resources import as_file, files
from pathlib import Path

from normkit.commands import lab_subject
from normkit.commands.lab_run import add_training, train_and_show
from normkit.lab.experiment import Experiment
from normkit.lab.experiment.reading import read
from normkit.lab.store import Store

NAME = "demo"
HELP = "five normalizers compared in a few minutes, with a report"
EXAMPLES = f"""\
examples:
  normkit demo
  normkit demo                 the same again shows the answer at once: results are kept
  normkit demo --fresh         forget them, and train again

It is an experiment like any other: its file is normkit/lab/demo.toml, and what it finds is kept
in {lab_subject.RESULTS}/demo.sqlite. Next: write your own, normkit lab --help

exit status: 0 done; 1 runs failed; 2 bad arguments or input; 130 interrupted"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--store", type=Path, metavar="FILE", help=f"default {lab_subject.RESULTS}/demo.sqlite")
    add("--fresh", action="store_true", help="forget earlier results")
    add_training(parser)


def experiment() -> Experiment:
    with as_file(files("normkit.lab") / "demo.toml") as file:
        return read(file)


def run(options: argparse.Namespace) -> int:
    asked = experiment()
    path = lab_subject.store_of(options, asked)
    if options.fresh:
        with Store(path) as store:
            store.forget(run.id for run in asked.runs())
    return train_and_show(asked, path, lab_subject.beside(path, asked, ".html"), options)
