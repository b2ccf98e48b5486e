"""The README's code runs as it stands, and its table is the catalog."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import normkit
from normkit import catalog
from normkit.cli import parser

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def python_blocks(text: str) -> list[tuple[int, str]]:
    """Every ```python block with the line on which its code starts."""
    found = re.finditer(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, block.start(1)), block[1]) for block in found]


def row(name: str) -> str:
    """The line of the README's table that a card asks for."""
    layer = catalog.ENTRIES[name]
    exact = "yes" if layer.card.exact_from_bn else "–"
    title, pool = layer.card.title, layer.card.shared_by
    return f"| `{name}` | `{layer.__name__}` | {title} | {pool} | {exact} |"


def test_blocks_run_in_order_in_one_namespace() -> None:
    blocks = python_blocks(README)
    assert len(blocks) >= 8
    assert README.count("```python") == len(blocks)
    namespace: dict[str, Any] = {"__name__": "readme"}
    for line, code in blocks:
        # the empty lines in front make a traceback name the line of the README
        exec(compile("\n" * line + code, "README.md", "exec"), namespace)


def test_blocks_assert_something() -> None:
    """A tour that checks nothing would keep running when a layer goes wrong."""
    assert sum(code.count("assert ") for _, code in python_blocks(README)) >= 8


def test_table_is_the_catalog() -> None:
    rows = re.findall(r"^\| `.*$", README, flags=re.MULTILINE)
    assert rows == [row(name) for name in normkit.names()]


def commands() -> list[list[str]]:
    """The lines of the section Commands, without what is said beside them."""
    block = README.split("## Commands", 1)[1].split("```")[1]
    return [re.split(r" {2,}", line)[0].split() for line in block.strip().splitlines()]


def test_every_command_is_one() -> None:
    found = commands()
    assert len(found) >= 10
    for program, *arguments in found:
        assert program == "normkit"
        assert "run" in parser().parse_args(arguments)  # what is no command or option exits here


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8"))
    own = [link for link in links if "://" not in link]
    assert [link for link in own if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_of_the_library_exist(page: Path) -> None:
    names = set(re.findall(r"\bnk\.(\w+)", page.read_text(encoding="utf-8")))
    public = {*normkit.__all__, "errors"}
    assert names - public == set()


def test_the_two_commands_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for command in ("demo", "test"):
        assert f"make {command}\n" in README
        assert re.search(rf"^{command}:", makefile, flags=re.MULTILINE)
    assert (ROOT / ".ci" / "run").read_text(encoding="utf-8").count("make test") == 1
