"""Where commands print, and the files they are asked to write."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from normkit.core.atomic_write import atomic_write_all, check_writable
from normkit.core.optional_dependencies import require
from normkit.errors import OptionError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

STANDARD_OUTPUT = Path("-")
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
    seen: set[Path] = set()
    for path in paths:
        if path.resolve() in seen:
            raise OptionError(f"{path} is asked for twice. Expected a name for each file.")
        seen.add(path.resolve())
        if path == STANDARD_OUTPUT:
            continue
        if not path.resolve().parent.is_dir():
            raise OptionError(f"There is no directory {path.parent} for {path.name}.")
        if path.is_dir():
            raise OptionError(f"{path} is a directory, expected the name of a file.")
        if path.exists() and not force:
            raise OptionError(f"{path} exists already. Try another name, or --force.")
        check_writable(path)


def text_writer(content: str) -> Callable[[Path], object]:
    """What writes a text, for ``atomic_write_all``."""
    return lambda path: path.write_text(content, encoding="utf-8")


# -------------------------------------------------------------------- JSON


def add_json(parser: argparse.ArgumentParser) -> None:
    """--json FILE, which every command has, and --force."""
    add = parser.add_argument
    add("--json", type=Path, metavar="FILE", help="write the facts as JSON; - is standard output")
    add("--force", action="store_true", help="overwrite existing files")


def screen_of(options: argparse.Namespace) -> Console:
    """Where a command prints for people: standard error, if a file goes to standard output."""
    files = (options.json, getattr(options, "html", None))
    return console(stderr=STANDARD_OUTPUT in files)


def check_json(options: argparse.Namespace) -> None:
    """An error, before any work, if the file of --json could not be written."""
    if options.json is not None:
        check_outputs([options.json], options.force)


def write_json(options: argparse.Namespace, content: Any) -> None:
    """What --json asks for, if it does."""
    if options.json is not None:
        write_texts({options.json: json_text(content)})


def json_text(content: Any) -> str:
    """JSON that every reader takes: numbers that are not finite are null."""
    return json.dumps(_plain(content), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def write_texts(texts: Mapping[Path, str]) -> None:
    """Write files, all or none; "-" is standard output."""
    files = {path: text for path, text in texts.items() if path != STANDARD_OUTPUT}
    atomic_write_all({path: text_writer(text) for path, text in files.items()})
    if STANDARD_OUTPUT in texts:
        sys.stdout.write(texts[STANDARD_OUTPUT])


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, int | str) else str(value)
