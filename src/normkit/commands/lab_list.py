"""The experiments that come with normkit: one for each table or figure of the papers."""

from __future__ import annotations

import argparse

from normkit.commands.lab_subject import shipped
from normkit.commands.screen import console, table
from normkit.errors import NothingToDo
from normkit.lab.experiment.reading import read, scales

NAME = "list"
HELP = "the experiments that come with normkit"
EXAMPLES = """\
examples:
  normkit lab list
  normkit lab run NAME --scale desk         minutes on two cores, where the experiment has it"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    del parser  # it needs none


def run(options: argparse.Namespace) -> int:
    found = shipped()
    if not found:
        raise NothingToDo("No experiments are installed. Try the path of a TOML file.")
    rows = []
    for name, path in found.items():
        experiment = read(path)
        rows.append((name, experiment.source, experiment.title, ", ".join(scales(path))))
    head = ("name", "source", "title", "scales")
    console().print(table("Experiments: normkit lab run NAME", head, rows))
    return 0
