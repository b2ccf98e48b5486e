"""What the commands have in common when they print."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NoReturn

from normkit.models import require

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

WIDE = 200  # columns in a file or a pipe, where nothing has to fit a window


def console(stderr: bool = False) -> Console:
    """Where to print; text in a pipe is not broken at 80 columns."""
    rich = require("rich.console", "cli", "The command line")
    made: Console = rich.Console(stderr=stderr, highlight=False, soft_wrap=False)
    if not made.is_terminal and "COLUMNS" not in os.environ:
        made = rich.Console(stderr=stderr, highlight=False, width=WIDE)
    made.on_broken_pipe = _nobody_reads  # type: ignore[method-assign]  # rich exits with 1
    return made


def _nobody_reads() -> NoReturn:
    raise BrokenPipeError


def table(title: str, head: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """A table; a column whose cells are all numbers is set to the right, an empty one left out."""
    rich = require("rich.table", "cli", "The command line")
    box = require("rich.box", "cli", "The command line")
    escape = require("rich.markup", "cli", "The command line").escape
    cells = [["" if cell is None else str(cell) for cell in row] for row in rows]
    used = [i for i in range(len(head)) if not cells or any(row[i] for row in cells)]
    made: Table = rich.Table(
        title=escape(title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False
    )
    for i in used:
        numbers = cells and all(_is_number(row[i]) for row in cells)
        made.add_column(
            head[i], justify="right" if numbers else "left", no_wrap=i == 0, overflow="fold"
        )
    for row in cells:
        made.add_row(*(escape(row[i]) for i in used))
    return made


def _is_number(text: str) -> bool:
    return not text.strip("0123456789.,e-+%")
