"""--json FILE of every command, with - for standard output; and completion in a shell."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from normkit.cli import parser
from normkit.commands.completion import SHELLS, script
from normkit.commands.output import json_text
from normkit.models import build

Run = Callable[..., Any]
EXPERIMENT = """
baseline = "bn"
seeds = 2
[data]
name = "synthetic:1x8x8x3x64"
[train]
epochs = 1
batch = 32
[[variants]]
name = "bn"
[[variants]]
name = "gn"
norm = "gn"
options = { groups = 4 }
"""
WEIGHTS = ("--weights", "w.pt")
COMMANDS = {
    "list": ("list",),
    "info": ("info", "bcn"),
    "survey": ("survey", "nets:small_net"),
    "convert": ("convert", "nets:small_net", "--to", "rbn", "--out", "new.pt", *WEIGHTS),
    "convert --dry-run": ("convert", "nets:small_net", "--to", "rbn", "--dry-run", *WEIGHTS),
    "diagnose": ("diagnose", "nets:small_net", "--data", "x.pt", *WEIGHTS),
    "calibrate": ("calibrate", "nets:small_net", "--data", "x.pt", "--dry-run", *WEIGHTS),
    "bench": ("bench", "gn", "--shape", "2x8x4x4", "--repeats", "1", "--no-compile"),
    "lab list": ("lab", "list"),
    "lab check": ("lab", "check", "my.toml"),
}


@pytest.fixture(autouse=True)
def inputs(nets: Path) -> None:
    torch.manual_seed(0)
    torch.save(build("nets:small_net").state_dict(), "w.pt")
    torch.save({"x": torch.randn(16, 3, 9, 9), "y": torch.randint(3, (16,))}, "x.pt")
    Path("my.toml").write_text(EXPERIMENT, encoding="utf-8")


@pytest.mark.parametrize("arguments", COMMANDS.values(), ids=COMMANDS)
def test_json_to_standard_output(normkit: Run, arguments: tuple[str, ...]) -> None:
    """It was written to a file named "-", and four commands of nine had no --json."""
    ran = normkit(*arguments, "--json", "-")
    assert ran.status == 0, ran.err
    assert json.loads(ran.out)  # nothing else is on standard output
    assert ran.err  # what people read
    assert not Path("-").exists()
    assert normkit(*arguments, "--force", "--json", "facts.json").status == 0
    content = json.loads(Path("facts.json").read_text(encoding="utf-8"))
    assert type(content) is type(json.loads(ran.out))
    if arguments[0] != "bench":  # seconds differ
        assert content == json.loads(ran.out)
    again = normkit(*arguments, "--json", "facts.json", "--out", "other.pt")
    assert again.status == 2


def leaves(
    each: argparse.ArgumentParser, path: str = ""
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    inner = [a for a in each._actions if isinstance(a, argparse._SubParsersAction)]
    if not inner:
        yield path, each
    for action in inner:
        for name, one in action.choices.items():
            yield from leaves(one, f"{path} {name}".strip())


@pytest.mark.parametrize(
    ("path", "each"), list(leaves(parser())), ids=lambda value: str(value)[:20]
)
def test_every_command_has_it(path: str, each: argparse.ArgumentParser) -> None:
    assert path == "completion" or "--json" in each._option_string_actions


def test_numbers_that_json_does_not_have() -> None:
    assert json.loads(json_text({"a": [float("nan"), float("inf"), 1.5, Path("x")]})) == {
        "a": [None, None, 1.5, "x"]
    }


# ---------------------------------------------------------------- completion

ASK = """
source completion.sh
COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
_normkit
echo "${{COMPREPLY[@]}}"
"""


@pytest.mark.skipif(not Path("/bin/bash").exists(), reason="there is no bash here")
@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("normkit con", "convert"),
        ("normkit la", "lab"),
        ("normkit lab exp", "export"),
        ("normkit lab export --for", "--force --format"),
        ("normkit lab export x.toml --format c", "csv"),
        ("normkit convert nets:small_net --to bc", "bcn"),
        ("normkit info gho", "ghost_bn"),
        ("normkit convert --out ''", ""),  # files: the shell's own completion
        ("normkit diagnose --fail-on s", "serious"),
        ("normkit completion b", "bash"),
    ],
)
def test_bash_completes(normkit: Run, words: str, completed: str) -> None:
    Path("completion.sh").write_text(normkit("completion", "bash").out, encoding="utf-8")
    ran = subprocess.run(
        ["/bin/bash", "-c", ASK.format(words=words)], capture_output=True, text=True, env=os.environ
    )
    assert ran.stderr == ""
    assert ran.stdout.strip() == completed


def test_scripts_of_both_shells() -> None:
    texts = {shell: script(parser(), shell, ["bn"]) for shell in SHELLS}
    assert "bashcompinit" in texts["zsh"]
    assert "bashcompinit" not in texts["bash"]
