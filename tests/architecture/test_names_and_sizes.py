"""Things are found by name: one class a name, no drawer for odds and ends, no endless file."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import normkit

ROOT = Path(__file__).parents[2]
SOURCE = Path(normkit.__file__).parent
FILES = sorted(
    file
    for folder in (SOURCE, ROOT / "tools", ROOT / "benchmarks")
    for file in folder.rglob("*.py")
)
VAGUE = {"utils", "util", "helpers", "helper", "misc", "common"}

LONGEST = 500
# longer ones, and why they are one idea that cannot be cut
LONG: dict[str, str] = {}

# still to be renamed; an entry that is no longer needed must go
NAMED_TWICE: set[str] = set()


def name(file: Path) -> str:
    return str(file.relative_to(SOURCE if file.is_relative_to(SOURCE) else ROOT).as_posix())


def test_one_class_a_name() -> None:
    """Of the package: a reader who meets a name need not ask which of two it is."""
    places: dict[str, list[str]] = defaultdict(list)
    for file in FILES:
        if file.is_relative_to(SOURCE):
            tree = ast.parse(file.read_text(encoding="utf-8"))
            for node in tree.body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places[node.name].append(name(file))
    assert "Normalizer" in places  # else nothing was read
    twice = {each: found for each, found in places.items() if len(found) > 1}
    assert {each: found for each, found in twice.items() if each not in NAMED_TWICE} == {}
    assert NAMED_TWICE - set(twice) == set(), "remove names that are used once by now"


def test_a_file_is_named_after_an_idea() -> None:
    vague = [name(f) for f in FILES if VAGUE & {f.stem, *Path(name(f)).parts}]
    assert vague == []


def test_long_files_have_a_reason() -> None:
    lengths = {name(file): file.read_text(encoding="utf-8").count("\n") for file in FILES}
    long = {each for each, lines in lengths.items() if lines > LONGEST}
    assert long - set(LONG) == set(), f"more than {LONGEST} lines: cut it in two, or say why not"
    assert set(LONG) - long == set(), "remove files that are not so long any more"
    assert all(len(reason) > 20 for reason in LONG.values())
