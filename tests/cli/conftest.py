"""A working directory of its own with a small model in a file, and the command as a function."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from normkit.cli import main

NETS = '''
from torch import nn


def small_net(width=8, classes=3):
    return nn.Sequential(
        nn.Conv2d(3, width, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
        nn.Conv2d(width, width, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes),
    )


class Shared(nn.Module):
    """One norm at two paths."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8)
        self.second, self.again = nn.Conv2d(8, 8, 1), self.norm

    def forward(self, x):
        return self.again(self.second(self.norm(self.first(x))))


class Nets:
    small = staticmethod(small_net)


def fails():
    raise RuntimeError("no such luck\\nsecond line")


def gives_text():
    return "model"


ready = small_net()
number = 3
'''


class Ran(NamedTuple):
    """What a command printed, and its exit status."""

    status: int
    out: str
    err: str


@pytest.fixture(autouse=True)
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory, in which nets.py is."""
    (tmp_path / "nets.py").write_text(NETS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    yield tmp_path
    sys.modules.pop("nets", None)


@pytest.fixture
def normkit(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """normkit("list", ...) runs the command in this process."""

    def run(*arguments: str) -> Ran:
        capsys.readouterr()
        try:
            status = main(arguments)
        except SystemExit as end:  # argparse's way to refuse
            status = int(end.code or 0)
        captured = capsys.readouterr()
        return Ran(status, captured.out, captured.err)

    return run
