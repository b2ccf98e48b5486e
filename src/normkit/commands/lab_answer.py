"""What an experiment has found so far: the table of verdicts, and the page."""

from __future__ import annotations

import sys
from pathlib import Path

from normkit.commands.screen import console
from normkit.lab.experiment import Experiment
from normkit.lab.report import print_verdicts, report
from normkit.lab.statistics import compare
from normkit.lab.store import FAILED, Reader
from normkit.models import MissingExtra


def show(experiment: Experiment, store: Reader, page: Path) -> None:
    """Write the page and print the verdicts; on a machine without the packages, say so."""
    ids = [run.id for run in experiment.runs()]
    results = store.results(ids)
    failures = {run: each.reason for run, each in store.status(ids).items() if each.state == FAILED}
    try:
        comparisons = compare(experiment, results)
        # before anything is printed: whoever reads our output may stop listening
        report(experiment, results, comparisons, page, failures=failures)
        screen = console()
        screen.print()
        print_verdicts(experiment, results, comparisons, screen)
    except MissingExtra as error:
        print(f"{len(results)} results are in {store.path}. {error}", file=sys.stderr)
        return
    screen.print(f"\nReport: {page.resolve()}", markup=False, soft_wrap=True)
