"""Five normalizers compared on small images of digits: with 64 images a worker, and with two.

Fifty small networks are trained, on as many cores as there are; it takes a few minutes. Then
paired statistics say which norms hold when each worker sees only two images."""

from __future__ import annotations

import argparse
from pathlib import Path

from normkit.commands.lab import RESULTS, add_training
from normkit.commands.output import add_json, check_json

NAME = "demo"
HELP = "five normalizers compared in a few minutes, with a report"
EXAMPLES = f"""\
examples:
  normkit demo
  normkit demo                 the same again shows the answer at once: results are kept
  normkit demo --fresh         forget them, and train again

It is an experiment like any other: its file is normkit/lab/demo.toml, and what it finds is kept
in {RESULTS}/demo.sqlite. Next: write your own, normkit lab --help

exit status: 0 done; 1 runs failed; 2 bad arguments or input; 130 interrupted"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--store", type=Path, metavar="FILE", help=f"default {RESULTS}/demo.sqlite")
    add("--fresh", action="store_true", help="forget earlier results")
    add_training(parser)
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    check_json(options)
    from normkit.commands import lab_actions

    return lab_actions.demo(options)
