"""Write the pages about the papers from what is committed.

python -m tools.evidence                      docs/papers.md, evidence.md, which-normalizer.md, and
                                              the table of docs/tasks-of-the-papers.md
python -m tools.evidence --reports FOLDER     also a page with charts for each experiment
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from normkit.core.atomic_write import write_text
from normkit.lab.statistics import compare
from tools.evidence.page import Evidence, evidence_page
from tools.evidence.papers import papers_page
from tools.evidence.tasks import tasks_page
from tools.evidence.which import which_page

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {
    "papers.md": papers_page,
    "evidence.md": evidence_page,
    "which-normalizer.md": which_page,
    "tasks-of-the-papers.md": tasks_page,
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.evidence",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--reports", type=Path, metavar="FOLDER", help="for pages with charts")
    options = parser.parse_args(arguments)
    for name, page in PAGES.items():
        write_text(DOCS / name, page())
    if options.reports:
        write_reports(options.reports)
    return 0


def write_reports(folder: Path) -> None:
    """One HTML page for each experiment that has results."""
    from normkit.lab.report import report  # jinja2 and plotly

    evidence = Evidence()
    for file, experiment in evidence.experiments.items():
        if results := evidence.results[file]:
            print(
                report(experiment, results, compare(experiment, results), folder / f"{file}.html")
            )


if __name__ == "__main__":
    raise SystemExit(main())
