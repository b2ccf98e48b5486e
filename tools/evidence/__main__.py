"""Write the pages about the papers from what is committed.

python -m tools.evidence                      docs/papers.md, evidence.md and its picture,
                                              which-normalizer.md, and the table of
                                              docs/tasks-of-the-papers.md
python -m tools.evidence --take FILE ...      first add runs of tools.evidence.train to the
                                              results, its runs.jsonl; runs that are there stay
python -m tools.evidence --reports FOLDER [NAME ...]
                                              instead a page with charts for each experiment, or
                                              for these, such as g-ubn
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from normkit.core.atomic_write import write_text
from normkit.errors import NormkitError
from normkit.lab.statistics import compare
from tools.evidence.claims import CLAIMS
from tools.evidence.evidence import Evidence
from tools.evidence.figure import evidence_figure
from tools.evidence.new_runs import taken
from tools.evidence.page import evidence_page
from tools.evidence.papers import papers_page
from tools.evidence.results import RESULTS
from tools.evidence.tasks import tasks_page
from tools.evidence.which import which_page

DOCS = Path(__file__).parents[2] / "docs"
PAGES: dict[str, Callable[[Path], str]] = {
    "papers.md": lambda _: papers_page(),
    "evidence.md": evidence_page,
    "evidence.svg": evidence_figure,
    "which-normalizer.md": which_page,
    "tasks-of-the-papers.md": lambda _: tasks_page(),
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.evidence",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--take", type=Path, nargs="+", metavar="FILE", help="of runs to add")
    parser.add_argument("--reports", type=Path, metavar="FOLDER", help="for pages with charts")
    parser.add_argument("only", nargs="*", metavar="NAME", help="experiments to report on")
    options = parser.parse_args(arguments)
    if options.reports:
        files = sorted(path.stem for path in CLAIMS.glob("*.toml"))
        if unknown := [name for name in options.only if name not in files]:
            parser.error(f"no experiment {', '.join(unknown)}; there are {', '.join(files)}")
        write_reports(options.reports, options.only)
        return 0
    if options.only:
        parser.error("names go with --reports FOLDER; pages are always written all")
    try:
        with taken(options.take or (), RESULTS) as (folder, told):
            pages = {name: page(folder) for name, page in PAGES.items()}
    except NormkitError as error:
        parser.error(str(error))
    for name, text in pages.items():
        write_text(DOCS / name, text)
    for line in told:
        print(line)
    return 0


def write_reports(folder: Path, only: Sequence[str] = ()) -> None:
    """One HTML page for each experiment that has results, or for these."""
    from normkit.lab.report import report  # jinja2 and plotly

    evidence = Evidence()
    for file, experiment in evidence.experiments.items():
        if only and file not in only:
            continue
        results = evidence.results[file]
        if not results:
            print(f"{file} was not run: no page.")
            continue
        claim = dataclasses.replace(experiment, title=f"Claim: {experiment.title}")
        print(report(claim, results, compare(claim, results), folder / f"{file}.html"))


if __name__ == "__main__":
    raise SystemExit(main())
