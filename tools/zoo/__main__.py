"""Try conversion on the models that people use: those of timm and torchvision.

Every model of timm that contains batch norm is built on the meta device, surveyed, converted
to each target and back; nothing may get lost in silence. Small ones of each family, and the
models of torchvision for classification, segmentation and detection, are also run, forward and
backward, before and after."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from normkit.cli import execute
from normkit.commands.output import console, table
from normkit.conversion.targets import find_target
from normkit.errors import NothingToDo, OptionError
from normkit.models import require
from tools.zoo.results import HEAD, Records, Report, failures, overview, reasons
from tools.zoo.sweep import Request, Sweep

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

TARGETS = "bn,gn,bcn,ubn"
RESULTS = Path("normkit-zoo.jsonl")
EXAMPLES = f"""\
examples:
  python -m tools.zoo                          everything: some minutes
  python -m tools.zoo --sample 60              only what is run: 60 small models of timm, and
                                               torchvision
  python -m tools.zoo --sample 60 --in-turn    the same with one target a model: a minute or
                                               two, for continuous integration
  python -m tools.zoo --to bcn --models 'timm:resnet*' 'torchvision:resnet*'

Results go to {RESULTS}, one line a model. The same command continues where it was
stopped, and tries again what failed; results of other versions of the libraries, or of other
code of normkit, do not count.

exit status: 0 no failures; 1 failures, which the table names; 2 bad arguments"""


def main(arguments: Sequence[str] | None = None) -> int:
    return execute(run, _parser().parse_args(arguments), "zoo")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.zoo",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--sample", type=int, metavar="N", help="run N small models of timm; none on meta alone")
    add("--to", default=TARGETS, metavar="TARGETS", help=f"comma-separated (default {TARGETS})")
    add("--in-turn", action="store_true", help="one target a model, by its name, instead of all")
    add("--models", nargs="+", default=[], metavar="PATTERN", help="only these, * for anything")
    add("--jobs", type=int, metavar="K", help="processes (default: one a core)")
    add("--results", type=Path, default=RESULTS, metavar="FILE", help=f"default {RESULTS}")
    add("--fresh", action="store_true", help="forget earlier results")
    return parser


def run(options: argparse.Namespace) -> int:
    request = _request(options)
    for library in ("timm", "torchvision"):
        require(library, "models", "The zoo")
    screen = console()
    if options.fresh:
        options.results.unlink(missing_ok=True)
    start = time.monotonic()
    sweep = Sweep(request, Records(options.results))
    with _progress(screen) as progress:
        bar = progress.add_task("listing timm's models", total=len(sweep.listing()))
        models, reports = sweep.describe(lambda name: progress.advance(bar))
        tasks = sweep.tasks(models)
        done = sweep.done(tasks)
        reports |= done
        bar = progress.add_task("converting", total=len(tasks), completed=len(done))
        for task, report in sweep.attempt([task for task in tasks if task.name not in done]):
            reports[task.name] = report
            progress.advance(bar)
            if not report.passed:
                progress.console.print(f"failed: {task.name}", markup=False)
    if not reports:
        raise NothingToDo(f"No model matches {' '.join(options.models)}. Try 'timm:resnet*'.")
    _show(screen, reports, len(done), time.monotonic() - start)
    return 0 if all(report.passed for report in reports.values()) else 1


def _request(options: argparse.Namespace) -> Request:
    targets = tuple(dict.fromkeys(t.strip() for t in options.to.split(",") if t.strip()))
    if not targets:
        raise OptionError(f"--to got {options.to!r}. Expected names, such as {TARGETS}.")
    for target in targets:
        find_target(target)
    jobs = os.cpu_count() or 1 if options.jobs is None else options.jobs
    for name, value, least in (("--sample", options.sample, 0), ("--jobs", jobs, 1)):
        if value is not None and value < least:
            raise OptionError(f"{name} got {value}, expected {least} or more.")
    return Request(targets, options.sample, tuple(options.models), options.in_turn, jobs)


def _progress(screen: Console) -> Progress:
    rich = require("rich.progress", "cli", "The zoo")
    columns = (
        rich.TextColumn("{task.description}"),
        rich.BarColumn(),
        rich.MofNCompleteColumn(),
        rich.TimeElapsedColumn(),
        rich.TextColumn("left"),
        rich.TimeRemainingColumn(),
    )
    progress: Progress = rich.Progress(*columns, console=screen)
    return progress


def _show(screen: Console, reports: dict[str, Report], kept: int, seconds: float) -> None:
    screen.print(table("Models by target", HEAD, overview(reports)))
    if why := reasons(reports):
        screen.print(table("Why norms were skipped", ("reason", "norms", "models"), why))
    if wrong := failures(reports):
        screen.print(table("Failures", ("model", "tried", "target", "what is wrong"), wrong))
    bad = sum(not report.passed for report in reports.values())
    again = f", {kept} of them known from before" if kept else ""
    verdict = f"{bad} failed" if bad else "none failed"
    screen.print(f"{len(reports)} trials{again}: {verdict}. {seconds:.0f} s.")


if __name__ == "__main__":
    sys.exit(main())
