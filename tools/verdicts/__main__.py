"""Simulate what the lab's verdicts promise; prints the tables of docs/verdicts.md.

python -m tools.verdicts                      both tables: some minutes
python -m tools.verdicts --only nothing       experiments in which nothing differs
python -m tools.verdicts --only intervals     intervals of several kinds
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from tools.verdicts.intervals import METHODS, coverage_rows
from tools.verdicts.null_experiments import null_rows

NULL_HEAD = (
    "runs", "seeds", "variants", "wrong verdict", "unstable", "an interval covers", "all cover",
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.verdicts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", choices=("intervals", "nothing"))
    parser.add_argument("--experiments", type=int, metavar="N", help="in each row of a table")
    options = parser.parse_args(arguments)
    if options.only != "nothing":
        rows = coverage_rows(options.experiments or 4000)
        print(markdown(("differences", "seeds", *METHODS), rows))
    if options.only != "intervals":
        print(markdown(NULL_HEAD, null_rows(options.experiments or 1000)))
    return 0


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
