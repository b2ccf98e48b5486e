"""Compare normalizers with evidence: from a file with a question to a page with the answer.

An experiment is a TOML file that names data, a model, variants, seeds and a schedule. It is
trained by `normkit lab run`, as far as results are missing, and what was found is shown with
paired statistics."""

from __future__ import annotations

import argparse

from normkit.commands import lab_check, lab_export, lab_list, lab_report, lab_run, lab_status

NAME = "lab"
HELP = "compare normalizers on your data, with paired statistics"
ACTIONS = (lab_run, lab_status, lab_report, lab_export, lab_check, lab_list)
EXAMPLES = """\
examples:
  normkit lab list                                  the experiments that come with normkit
  normkit lab check my.toml                         is it complete, and do the models build?
  normkit lab run my.toml                           train what is missing, then show the answer
  normkit lab run my.toml                           the same again: goes on after Ctrl-C or a crash
  normkit lab run my.toml --seeds 10                more seeds; the first ones are not trained again
  normkit lab status my.toml                        while it runs, from another terminal
  normkit lab export my.toml --format latex

a small experiment:
  baseline = "bn"
  seeds = 5
  [data]
  name = "digits"
  [train]
  epochs = 10
  batch = 64
  [[variants]]
  name = "bn"
  [[variants]]
  name = "gn"
  norm = "gn"
  options = { groups = 4 }

Each of them has more examples: normkit lab run --help"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(title="actions", metavar="ACTION")
    for action in ACTIONS:
        added = kinds.add_parser(
            action.NAME,
            aliases=getattr(action, "ALIASES", ()),
            help=action.HELP,
            description=action.__doc__,
            epilog=action.EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        action.add_arguments(added)
        added.set_defaults(action=action.run)
    parser.set_defaults(action=None, lab=parser)


def run(options: argparse.Namespace) -> int:
    if options.action is None:
        options.lab.print_help()
        return 2
    status: int = options.action(options)
    return status
