"""Where commands print, and the files they are asked to write."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from normkit.core.optional_dependencies import require
from normkit.errors import OptionError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

WIDE = 200  # columns in a file or a pipe, where nothing has to fit a window


def console(stderr: bool = False) -> Console:
    """Where to print; text in a pipe is not broken at 80 columns."""
    rich = require("rich.console", "cli", "The command line")
    screen: Console = rich.Console(stderr=stderr, highlight=False, soft_wrap=False)
    if not screen.is_terminal and "COLUMNS" not in os.environ:
        screen = rich.Console(stderr=stderr, highlight=False, width=WIDE)
    screen.on_broken_pipe = _broken_pipe  # type: ignore[method-assign]  # rich exits with 1
    return screen


def _broken_pipe() -> NoReturn:
    raise BrokenPipeError


def table(title: str, head: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """A table; a column whose cells are all numbers is set to the right, an empty one left out."""
    rich = require("rich.table", "cli", "The command line")
    box = require("rich.box", "cli", "The command line")
    escape = require("rich.markup", "cli", "The command line").escape
    cells = [["" if cell is None else str(cell) for cell in row] for row in rows]
    used = [i for i in range(len(head)) if not cells or any(row[i] for row in cells)]
    result: Table = rich.Table(
        title=escape(title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False
    )
    for i in used:
        numbers = cells and all(_is_number(row[i]) for row in cells)
        result.add_column(
            head[i], justify="right" if numbers else "left", no_wrap=i == 0, overflow="fold"
        )
    for row in cells:
        result.add_row(*(escape(row[i]) for i in used))
    return result


def _is_number(text: str) -> bool:
    return not text.strip("0123456789.,e-+%")


def check_outputs(paths: Iterable[Path], force: bool) -> None:
    """An error, before any work, if a file could not be written at its end."""
    for path in paths:
        if not path.resolve().parent.is_dir():
            raise OptionError(f"There is no directory {path.parent} for {path.name}.")
        if path.is_dir():
            raise OptionError(f"{path} is a directory, expected the name of a file.")
        if path.exists() and not force:
            raise OptionError(f"{path} exists already. Try another name, or --force.")


def text_writer(content: str) -> Callable[[Path], object]:
    """What writes a text, for ``atomic_write_all``."""
    return lambda path: path.write_text(content, encoding="utf-8")
