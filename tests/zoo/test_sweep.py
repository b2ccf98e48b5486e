"""python -m tools.zoo: what it prints, remembers and returns."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tools.zoo import sweep
from tools.zoo.__main__ import main
from tools.zoo.results import Outcome, Report, Task
from tools.zoo.sweep import Request, Sweep

Run = Callable[..., Any]
MODELS = ("--models", "timm:test_*net", "torchvision:mnasnet0_5")


class Here:
    """Work in this process; notes what was asked for, and stops where it is told to."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.bad: set[str] = set()
        self.stop_before: str | None = None

    def __call__(self, function: Any, tasks: Any, jobs: int, limit: float) -> Iterator[Any]:
        for task in tasks:
            name = task.reference if isinstance(task, Task) else task
            if isinstance(task, Task) and name == self.stop_before:
                raise KeyboardInterrupt
            self.asked.append(task)
            if isinstance(task, Task) and name in self.bad:
                yield task, Report(1, outcomes={"gn": Outcome(failures=["lost [something]"])})
            else:
                yield task, function(task)


class Ran(NamedTuple):
    """What the command printed, and its exit status."""

    status: int
    out: str
    err: str


@pytest.fixture
def zoo(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Ran]:
    """zoo("--to", "gn") runs the command in this process and a working directory of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)

    def run(*arguments: str) -> Ran:
        capsys.readouterr()
        status = main(arguments)
        captured = capsys.readouterr()
        return Ran(status, captured.out, captured.err)

    return run


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Here:
    made = Here()
    monkeypatch.setattr(sweep, "run_in_processes", made)
    return made


def tried(here: Here) -> list[str]:
    return [task.name for task in here.asked if isinstance(task, Task)]


def test_in_processes_of_its_own(zoo: Run) -> None:
    ran = zoo(*MODELS, "--to", "bn,ubn", "--sample", "2", "--jobs", "1")
    assert ran.status == 0, ran.out
    assert "3 trials: none failed" in ran.out
    lines = [json.loads(line) for line in Path("normkit-zoo.jsonl").read_text().splitlines()]
    assert sum(line["name"].startswith("run ") for line in lines) == 3


def test_everything_or_a_sample(zoo: Run, here: Here) -> None:
    assert zoo(*MODELS, "--to", "gn").status == 0
    names = tried(here)
    assert "meta timm:test_resnet" in names
    assert "run timm:test_resnet" in names
    assert "run torchvision:mnasnet0_5" in names
    assert "meta torchvision:mnasnet0_5" not in names
    here.asked.clear()
    assert zoo(*MODELS, "--to", "gn", "--sample", "1", "--fresh").status == 0
    names = tried(here)
    assert [name.split(":")[0] for name in names] == ["run timm", "run torchvision"]


def test_the_same_command_continues(zoo: Run, here: Here) -> None:
    command = (*MODELS, "--to", "gn", "--sample", "2")
    here.stop_before = "torchvision:mnasnet0_5"
    ran = zoo(*command)
    assert ran.status == 130
    assert ran.err == "zoo: interrupted\n"
    first = tried(here)
    assert len(first) == 2
    here.asked.clear()
    here.stop_before = None
    ran = zoo(*command)
    assert ran.status == 0
    assert here.asked == [Task("torchvision:mnasnet0_5", ("gn",), runs=True)]
    assert "3 trials, 2 of them known from before: none failed" in ran.out
    here.asked.clear()
    assert zoo(*command).status == 0
    assert here.asked == []
    assert zoo(*MODELS, "--to", "bn", "--sample", "2").status == 0  # other targets, new trials
    assert len(tried(here)) == 3


def test_results_of_other_code_do_not_count(
    zoo: Run, here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = (*MODELS, "--to", "gn", "--sample", "0")
    assert zoo(*command).status == 0
    monkeypatch.setattr(sweep, "source_digest", lambda: "changed")
    here.asked.clear()
    assert zoo(*command).status == 0
    assert tried(here) == ["run torchvision:mnasnet0_5"]
    assert len(here.asked) == 1  # the models are still the same


def test_failures_are_shown_and_tried_again(zoo: Run, here: Here) -> None:
    command = (*MODELS, "--to", "gn", "--sample", "0")
    here.bad = {"torchvision:mnasnet0_5"}
    ran = zoo(*command)
    assert ran.status == 1
    assert "Failures" in ran.out
    assert "lost [something]" in ran.out
    assert "1 trials: 1 failed" in ran.out
    here.bad = set()
    assert zoo(*command).status == 0


def test_one_target_a_model(tmp_path: Path) -> None:
    request = Request(("bn", "gn", "bcn", "ubn"), in_turn=True, sample=0)
    tasks = Sweep(request, sweep.Records(tmp_path / "r.jsonl")).tasks([])
    assert {len(task.targets) for task in tasks} == {1}
    used = {task.targets[0] for task in tasks}
    assert used == {"bn", "gn", "bcn", "ubn"}


REFUSED = {
    "unknown target": (("--to", "bn,bcnn"), "'bcn'"),
    "no target": (("--to", ","), "Expected names"),
    "no model matches": (("--models", "timm:qq*", "--results", "r.jsonl"), "No model"),
    "negative sample": (("--sample", "-1"), "expected 0 or more"),
    "no results": (("--results", "notes.txt"), "not a file of zoo results"),
}


@pytest.mark.parametrize(("arguments", "said"), REFUSED.values(), ids=REFUSED)
def test_one_line_and_status_2(zoo: Run, arguments: tuple[str, ...], said: str) -> None:
    Path("notes.txt").write_text("mine", encoding="utf-8")
    ran = zoo(*arguments)
    assert ran.status == 2
    assert ran.err.startswith("zoo: ")
    assert ran.err.count("\n") == 1
    assert said in ran.err
    assert [file.name for file in Path().iterdir()] == ["notes.txt"]
    assert Path("notes.txt").read_text(encoding="utf-8") == "mine"


def test_help_teaches_by_example(zoo: Run, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        zoo("--help")
    said = capsys.readouterr().out
    assert "python -m tools.zoo --sample 60" in said.partition("examples:")[2]
