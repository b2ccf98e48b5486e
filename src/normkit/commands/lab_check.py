"""Check an experiment without training: its file, its data sets and its models.

Every mistake in the file is told with its key and line, at all of its scales; every data set of
the chosen scale is looked for, and every model is built, converted and run on a few random images.
"""

from __future__ import annotations

import argparse

from normkit.commands import lab_subject
from normkit.commands.lab_checking import check
from normkit.commands.screen import console
from normkit.core.messages import counted
from normkit.lab.experiment.checks import different_ground
from normkit.lab.experiment.reading import read, scales

NAME = "check"
HELP = "check an experiment without training"
EXAMPLES = f"""\
examples:
  normkit lab check my.toml
  normkit lab check my.toml --scale paper

{lab_subject.WHERE}

exit status: 0 it can be trained; 2 it cannot, and why"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    lab_subject.add_experiment(parser)


def run(options: argparse.Namespace) -> int:
    experiment = lab_subject.experiment_of(options)
    if options.scale is None:  # those that nobody has asked for may hold mistakes as well
        for scale in scales(path := lab_subject.find(options.file)):
            read(path, scale)
    check(experiment)
    runs, cells = experiment.runs(), experiment.cells()
    names = list(dict.fromkeys(variant.name for variant in experiment.variants))
    epochs = sum(run.setting.train.epochs for run in runs)
    where = f" in {len(cells)} cells" if len(cells) > 1 else ""
    scale = f" at scale {experiment.scale}" if experiment.scale else ""
    screen = console()
    screen.print(f"“{experiment.title}”{scale} can be trained.", markup=False)
    screen.print(
        f"{counted(len(names), 'variant')} ({', '.join(names)}){where} × "
        f"{counted(len(experiment.seeds), 'seed')}: {counted(len(runs), 'run')}, "
        f"{counted(epochs, 'epoch')}. Baseline: {experiment.baseline}.",
        markup=False,
    )
    for caution in different_ground(experiment):
        screen.print(f"! {caution}", markup=False, soft_wrap=True)
    return 0
