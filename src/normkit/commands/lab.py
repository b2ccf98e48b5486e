"""Compare normalizers with evidence: from a file with a question to a page with the answer.

An experiment is a TOML file that names data, a model, variants, seeds and a schedule. It is
trained by `normkit lab run`, as far as results are missing, and what was found is shown with
paired statistics."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from normkit.commands.output import add_json, check_json

NAME = "lab"
HELP = "compare normalizers on your data, with paired statistics"
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

RESULTS = Path("results")
WHERE = f"""\
FILE is a TOML file, or the name of an experiment that comes with normkit (normkit lab list).
Results are kept in {RESULTS}/NAME.sqlite of the working directory, or where --store says."""

# what the lab offers; a help page does not import it to know
METRICS = ("accuracy", "error", "loss", "top5_accuracy", "top5_error")
ENGINES = ("local", "ray", "slurm")
EXPORT_FORMATS = ("csv", "parquet", "latex")
EXPORT_ROWS = ("run", "epoch", "comparison")


class Action(NamedTuple):
    """What `normkit lab` can be asked to do."""

    name: str
    help: str
    description: str
    examples: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    aliases: tuple[str, ...] = ()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(title="actions", metavar="ACTION")
    for action in ACTIONS:
        added = actions.add_parser(
            action.name,
            aliases=action.aliases,
            help=action.help,
            description=action.description,
            epilog=action.examples,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        action.add_arguments(added)
        added.set_defaults(action=action.name)
    parser.set_defaults(action=None, lab=parser)


def run(options: argparse.Namespace) -> int:
    if options.action is None:
        options.lab.print_help()
        return 2
    check_json(options)
    from normkit.commands import lab_actions, lab_diff, lab_log, lab_new, lab_status

    actions = {
        "run": lab_actions.run,
        "status": lab_status.status,
        "log": lab_log.log,
        "diff": lab_diff.diff,
        "new": lab_new.new,
        "report": lab_actions.report,
        "export": lab_actions.export,
        "check": lab_actions.check,
        "list": lab_actions.list_experiments,
    }
    return actions[options.action](options)


# ---------------------------------------------------------------- arguments


def _add_experiment(parser: argparse.ArgumentParser, nargs: str | None = None) -> None:
    add = parser.add_argument
    add("file", metavar="FILE", nargs=nargs, help="a TOML file, or a name; see below")
    _add_choice(parser)


def _add_choice(parser: argparse.ArgumentParser) -> None:
    """Which part of an experiment, and which store."""
    add = parser.add_argument
    add("--scale", metavar="NAME", help="of those in the file: paper, lab, desk, …")
    add("--seeds", metavar="N", help="so many seeds instead of the file's; or a list, 1,2,7")
    add("--metric", metavar="NAME", help=f"instead of the file's: {', '.join(METRICS)}")
    add(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        dest="overrides",
        help="a key of the file with another value, train.lr=0.05; may be repeated",
    )
    add("--store", type=Path, metavar="FILE", help=f"default {RESULTS}/NAME.sqlite")
    add_json(parser)


def add_training(parser: argparse.ArgumentParser) -> None:
    """How runs are trained; `normkit demo` has these as well."""
    add = parser.add_argument
    add("--workers", type=int, metavar="K", help="processes (default: one a core, or one a GPU)")
    add("--device", metavar="NAME", help="cpu, cuda or cuda:0 (default: the GPUs if there are any)")
    add(
        "--together",
        type=int,
        metavar="N",
        help="runs of one variant that a process on a GPU trains side by side (default 4 at most)",
    )
    add("--minutes", type=float, metavar="M", help="stop after so long; may be gone on with")
    add("--engine", choices=ENGINES, default="local", help="default local")
    add(
        "--track",
        metavar="NAME",
        action="append",
        default=[],
        help="tensorboard, mlflow or wandb, or NAME=WHERE: show runs there as they go on",
    )
    add("--no-check", action="store_true", help="try no models first: they have been, by lab check")
    add("--no-report", action="store_true", help="only train")


def _add_run(parser: argparse.ArgumentParser) -> None:
    _add_experiment(parser, nargs="+")
    add_training(parser)


def _add_status(parser: argparse.ArgumentParser) -> None:
    _add_experiment(parser, nargs="?")


def _add_log(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("which", metavar="RUN", help="variant and seed, 'gn, seed 3', or the beginning of an id")
    add("--file", metavar="FILE", help="of this experiment (default: of all that were run here)")
    _add_choice(parser)


def _add_diff(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("first", metavar="A", help="a TOML file, a name, or a store; with @SCALE, if wanted")
    add("second", metavar="B", help="the other one")
    add("--store", type=Path, metavar="FILE", help="of files (default results/NAME.sqlite)")
    add_json(parser)


def _add_new(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("file", type=Path, metavar="FILE", help="to be written")
    add("--title", metavar="TEXT", help="the question, as the page shows it")
    add("--data", metavar="NAME", help="digits, cifar10, …, or folder")
    add("--path", metavar="FOLDER", help="of the images, for folder")
    add("--model", metavar="NAME", help="torchvision:resnet18, timm:resnet50, package.module:name")
    add("--norms", metavar="A,B", help="to be compared with the model as it is (normkit list)")
    add("--epochs", type=int, metavar="N")
    add("--batch", type=int, metavar="N")
    add("--seeds", type=int, metavar="N")
    add("--yes", action="store_true", help="ask nothing: defaults for what is not given")
    add_json(parser)


def _add_report(parser: argparse.ArgumentParser) -> None:
    _add_experiment(parser)
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="the page (default: beside the results)"
    )


def _add_export(parser: argparse.ArgumentParser) -> None:
    _add_experiment(parser)
    add = parser.add_argument
    add("--format", choices=EXPORT_FORMATS, default="csv", help="default csv")
    add("--per", choices=EXPORT_ROWS, default="run", help="a row for each (default run)")
    add("--out", type=Path, metavar="FILE", help="default: beside the results")


ACTIONS = (
    Action(
        "new",
        "write the file of an experiment",
        """\
Write the file of an experiment, with comments, from the answers to a few questions.

Options answer questions; with --yes, or without a terminal, what they leave open has its
default. The file is checked before it is written.""",
        """\
examples:
  normkit lab new my.toml
  normkit lab new my.toml --data cifar10 --model torchvision:resnet18 --norms gn,bcn --yes
  normkit lab new mine.toml --data folder --path photos --yes""",
        _add_new,
    ),
    Action(
        "run",
        "train what is missing, then show the answer",
        """\
Train what an experiment lacks, and show what it found.

Everything is checked before anything trains. The same command goes on where it was stopped, by
Ctrl-C, a crash or a full disk, and comes to the same numbers; it may also run several times at
once on one store.""",
        f"""\
examples:
  normkit lab run my.toml
  normkit lab run my.toml --scale paper --device cuda
  normkit lab run my.toml --seeds 15 --workers 4 --no-report
  normkit lab run my.toml --set train.lr=0.05 --set train.epochs=20
  normkit lab run one.toml two.toml --store both.sqlite --workers 16 --minutes 30
  normkit lab run my.toml --engine ray         on the machines of a Ray cluster
  normkit lab run my.toml --engine slurm       as arrays of a SLURM cluster
  normkit lab run my.toml --track tensorboard  then: tensorboard --logdir results/tensorboard

{WHERE}
Where there is no GPU, each core of the CPU trains one run; on a GPU, small runs of one variant
train side by side. Several experiments are one queue, first seeds first, and share a store.

exit status: 0 done; 1 runs failed, which are named, and tried again the next time; 2 bad
arguments or input; 3 the time of --minutes was over first; 130 interrupted""",
        _add_run,
        aliases=("resume",),
    ),
    Action(
        "status",
        "what is done, what is being trained, what failed",
        """\
How far experiments are: what is done, what is being trained, and what failed and why.

It only reads, and may be asked while a sweep goes on.""",
        f"""\
examples:
  normkit lab status                        every store in {RESULTS}/
  normkit lab status my.toml                one experiment, variant by variant

{WHERE}""",
        _add_status,
    ),
    Action(
        "log",
        "one run: how it was made, and why it failed",
        """\
Show one run: where it stands, the versions, device and command that made it, and, if it failed,
the traceback and what its process printed.""",
        f"""\
examples:
  normkit lab log 'gn, seed 3'              as lab status names it
  normkit lab log 4f1c                      the beginning of an id
  normkit lab log 'gn, seed 3' --file my.toml --scale paper

{WHERE}""",
        _add_log,
    ),
    Action(
        "diff",
        "two experiments: what differs, and what each found",
        """\
Show which settings of two experiments differ, and their results side by side.

Each is a file, with its results where there are any, or a store, of which the experiment that was
last run counts.""",
        """\
examples:
  normkit lab diff first.toml second.toml
  normkit lab diff my.toml@desk my.toml@lab           two scales of one file
  normkit lab diff results/old.sqlite my.toml         what was run, and the file as it is now""",
        _add_diff,
    ),
    Action(
        "report",
        "show the answer, and write it as a page",
        """\
Show the answer of an experiment, and write it as a page: one HTML file that needs no network.

Nothing is trained. A page of an experiment that is still running says what is missing.""",
        f"""\
examples:
  normkit lab report my.toml
  normkit lab report my.toml --scale paper --out answer.html
  normkit lab report my.toml --metric top5_error

{WHERE}""",
        _add_report,
    ),
    Action(
        "export",
        "results as CSV, Parquet or a LaTeX table",
        """\
Write the results of an experiment for other programs.

csv and parquet have a row for each run, for each epoch of each run, or for each comparison with
the baseline: every number behind a verdict. latex is a table as in the papers: mean ± standard
deviation, bold if significant, the best underlined.""",
        f"""\
examples:
  normkit lab export my.toml --format csv
  normkit lab export my.toml --format parquet --per epoch
  normkit lab export my.toml --per comparison
  normkit lab export my.toml --format latex --out table.tex

{WHERE}""",
        _add_export,
    ),
    Action(
        "check",
        "check an experiment without training",
        """\
Check an experiment without training: its file, its data sets and its models.

Every mistake in the file is told with its key and line, at all of its scales; every data set of
the chosen scale is looked for, and every model is built, converted and run on a few random images.
""",
        f"""\
examples:
  normkit lab check my.toml
  normkit lab check my.toml --scale paper

{WHERE}

exit status: 0 it can be trained; 2 it cannot, and why""",
        _add_experiment,
    ),
    Action(
        "list",
        "the experiments that come with normkit",
        "The experiments that come with normkit: one for each table or figure of the papers.",
        """\
examples:
  normkit lab list
  normkit lab run NAME --scale desk         minutes on two cores, where the experiment has it""",
        add_json,
    ),
)
"""In the order of ``normkit lab --help``."""
