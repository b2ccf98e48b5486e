"""Every key that tomllib finds has a line, and it is the right one."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from typing import Any

import hypothesis.strategies as st
from hypothesis import given

from normkit.lab.experiment.problems import KeyPath, key_lines

TRICKY = '''# a comment with [brackets] and "quotes"
title = "a \\"quoted\\" # text"      # not = a key
'single quoted' = 'C:\\path'
"dotted.in quotes" = 1
a.b."c.d" = 2
long = """first
[not.a.table]
ends with two""\\"more"""""
raw = \'\'\'
x = 1
\'\'\'
when = 1979-05-27 07:32:00
[train]   # table
lr = 0.1
milestones = [
  30,  # thirty
  60, ]
options = { depth = 2, inner = { x = [1, { y = "}" }] } }

[[variants]]
name = "a"
[variants.train]
lr = 1
[[variants]]
[[variants.steps]]
norm = "gn"
[[variants.steps]]
norm = "bn"
[variants.steps.options]
groups = 4
[scales.lab.train]
lr = 3
'''


def paths(value: Any, path: KeyPath = ()) -> Iterator[KeyPath]:
    """Every key and index of what tomllib gives."""
    if path:
        yield path
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from paths(inner, (*path, key))
    if isinstance(value, list):
        for number, inner in enumerate(value):
            yield from paths(inner, (*path, number))


def test_every_key_of_a_tricky_file_has_a_line_and_no_other_key_has_one() -> None:
    assert set(key_lines(TRICKY)) == set(paths(tomllib.loads(TRICKY)))


def test_lines_are_those_an_editor_shows() -> None:
    lines, text = key_lines(TRICKY), TRICKY.splitlines()

    def line(start: str, nth: int = 0) -> int:
        return [n for n, each in enumerate(text, 1) if each.startswith(start)][nth]

    assert lines["a", "b", "c.d"] == line("a.b.")
    assert lines["dotted.in quotes",] == line('"dotted')
    assert lines["when",] == line("when")
    assert lines["train", "milestones", 1] == line("  60")
    assert lines["train", "options", "inner", "x", 1, "y"] == line("options")
    assert lines["variants", 0, "train", "lr"] == line("lr = 1")
    assert lines["variants", 1] == line("[[variants]]", 1)
    assert lines["variants", 1, "steps", 1, "options", "groups"] == line("groups")
    assert lines["scales", "lab", "train", "lr"] == line("lr = 3")


def test_windows_line_ends_count_once() -> None:
    assert key_lines("a = 1\r\nb = 2\r\n")["b",] == 2


TEXT = st.text(st.sampled_from("ab\"'\\#[]{}=,.\n "), max_size=6)
SCALAR = st.one_of(st.integers(), st.booleans(), TEXT)
VALUE = st.recursive(
    SCALAR,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


def written(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        return f'"{escaped}"'
    if isinstance(value, list):
        return "[\n" + ",\n".join(map(written, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{written(k)} = {written(v)}" for k, v in value.items()) + "}"
    return str(value)


@given(st.dictionaries(TEXT, VALUE, max_size=4))
def test_any_document_is_understood_as_tomllib_does(document: dict[str, Any]) -> None:
    text = "".join(f"{written(key)} = {written(value)}\n" for key, value in document.items())
    assert tomllib.loads(text) == document
    assert set(key_lines(text)) == set(paths(document))
