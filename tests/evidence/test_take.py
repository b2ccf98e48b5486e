"""What is no result is refused, by file and line, before anything is written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from normkit.lab.results import DONE, Epoch, Result
from tools.evidence import __main__ as command
from tools.evidence.checks import contradictions
from tools.evidence.claims import CLAIMS, experiment_of
from tools.evidence.new_runs import NewRuns, NewRunsError, read_new_runs, take, taken
from tools.evidence.results import read_all, read_results, write_results

FILE = "g-ubn"
RUNS = experiment_of(FILE).runs()
Record = dict[str, Any]


def result(place: int) -> Result:
    epochs = tuple(Epoch(i, test_accuracy=0.8, test_loss=0.5) for i in range(1, 6))
    return Result(
        RUNS[place].id, DONE, (5,), epochs, 2.0, 10,
        environment={"device": "a GPU"}, classes=10, test_samples=10_000,
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Results of ten runs."""
    folder = tmp_path / "committed"
    folder.mkdir()
    write_results(experiment_of(FILE), {RUNS[i].id: result(i) for i in range(10)}, folder)
    return folder


def brought(path: Path, *places: int) -> Path:
    new = NewRuns(path)
    new.begin(6)
    for place in places:
        new.add(result(place), "a run", 1.0)
    return path


def changed(path: Path, number: int, change: Callable[[Record], Any]) -> None:
    lines = path.read_text().splitlines()
    record = json.loads(lines[number - 1])
    lines[number - 1] = json.dumps(change(record) or record)
    path.write_text("\n".join(lines) + "\n")


def last(**values: Any) -> Callable[[Record], None]:
    return lambda record: record["epochs"][-1].update(values)


def whole(**values: Any) -> Callable[[Record], None]:
    return lambda record: record.update(values)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (last(test_accuracy=78.5), "test_accuracy of epoch 5 is 78.5, expected a share from 0 to"),
        (last(test_accuracy=-1), "is -1, expected a share from 0 to 1"),
        (last(test_accuracy=float("inf")), "is inf, expected a share from 0 to 1"),
        (last(test_accuracy=float("nan")), "is nan, expected a share from 0 to 1"),
        (last(test_accuracy="0.8"), "is '0.8', expected a number"),
        (last(test_accuracy=None), "test_accuracy of epoch 5, which counts, is not there"),
        (last(train_loss=-1), "train_loss of epoch 5 is -1, expected 0 or more"),
        (whole(status="hello"), "its status is 'hello', expected 'done' or 'diverged'"),
        (whole(status="failed"), "its status is 'failed'"),
        (whole(environment={"device": "CPU, AVX512"}), "its device is 'CPU, AVX512', expected a"),
        (whole(environment={}), "its device is '', expected a GPU"),
        (whole(environment="a GPU?"), "its device is None"),
        (whole(epochs=[]), "it has 0 of 5 epochs"),
        (lambda record: record.update(epochs=record["epochs"][:2], selected=[2]), "has 2 of 5"),
        (whole(selected=[99]), r"the epochs that count are \[99\], expected \[5\]"),
        (whole(epochs="five"), "cannot be read"),
        (whole(nonsense=1), "cannot be read"),
        (lambda record: record.pop("after") and None, r"cannot be read \(KeyError: 'after'\)"),
        (whole(after=-1), "after is -1"),
        (whole(seconds="two"), "its seconds are 'two'"),
    ],
)
def test_a_run_that_cannot_be_what_was_planned(
    change: Callable[[Record], Any], said: str, tmp_path: Path, folder: Path
) -> None:
    """Percents, -1, "hello" and runs of a CPU were taken; then came a traceback."""
    file = brought(tmp_path / "new.jsonl", 10, 11)
    changed(file, 3, change)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(NewRunsError, match=rf"new\.jsonl, line 3.*({said})"):
        take(file, folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize(
    "line", ["[1]", "5", "null", "{}", '{"sweep":{}}', '{"sweep":{"started":1}}']
)
def test_a_line_that_says_nothing_known(line: str, tmp_path: Path, folder: Path) -> None:
    file = brought(tmp_path / "new.jsonl", 10)
    with file.open("a") as stream:
        stream.write(f"{line}\n")
    with pytest.raises(NewRunsError, match=r"line 3 cannot be read"):
        take(file, folder)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "has no run"),
        (b"\x93\xff\x00\x01random\n\n", "line 1 is no JSON"),
        ('{"sweep":{}}\n'.encode("utf-16"), "line 1 is no JSON"),
        (b'{"sweep":{"started":"today","workers":6}}\n', "has no run"),
        (b'{"sweep":{"started":"to', "has no run"),
    ],
)
def test_a_file_without_runs(content: bytes, said: str, tmp_path: Path, folder: Path) -> None:
    """ "0 of 0 runs were new" was said of anything."""
    file = tmp_path / "new.jsonl"
    file.write_bytes(content)
    with pytest.raises(NewRunsError, match=said):
        take(file, folder)
    with pytest.raises(NewRunsError, match="cannot be read: Is a directory"):
        take(tmp_path, folder)


def test_two_results_of_a_run_in_one_file(tmp_path: Path, folder: Path) -> None:
    """The last one was taken."""
    file = brought(tmp_path / "new.jsonl", 10)
    lines = file.read_text().splitlines()
    file.write_text("\n".join([*lines, lines[-1]]) + "\n")
    assert take(file, folder) == (1, 1)  # the same twice
    changed(file, 3, last(test_accuracy=0.7))
    with pytest.raises(NewRunsError, match=r"line 3 has run \w+ with other numbers than line 2"):
        read_new_runs(file)


def test_all_files_are_checked_and_pages_made_before_anything_is_written(
    tmp_path: Path,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of two files the first was written when the second was refused, and no page."""
    docs = tmp_path / "docs"
    docs.mkdir()
    files = [brought(tmp_path / f"{name}.jsonl", at) for name, at in (("one", 10), ("two", 11))]
    changed(files[1], 2, last(test_accuracy=80))
    monkeypatch.setattr(command, "DOCS", docs)
    monkeypatch.setattr(command, "RESULTS", folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(SystemExit) as stop:
        command.main(["--take", *map(str, files)])
    assert stop.value.code == 2
    assert "two.jsonl, line 2: test_accuracy" in capsys.readouterr().err
    assert not [*docs.iterdir()]
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    changed(files[1], 2, last(test_accuracy=0.8))
    monkeypatch.setattr(command, "PAGES", {"a.md": lambda results: f"{len(read_all(results))}"})
    command.main(["--take", *map(str, files)])
    assert capsys.readouterr().out.count("1 of 1 runs of ") == 2
    assert (docs / "a.md").read_text() == "12"
    assert len(read_results(experiment_of(FILE), folder)) == 12


def test_a_page_that_cannot_be_made_stops_before_anything_is_written(
    tmp_path: Path, folder: Path
) -> None:
    file = brought(tmp_path / "new.jsonl", 10)

    def pages(stage: Path) -> None:
        assert len(read_all(stage)) == 11
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), taken([file], folder) as (stage, _):
        pages(stage)
    assert len(read_all(folder)) == 10


def test_every_committed_run_can_be_what_was_planned() -> None:
    planned = {
        run.id: run for path in CLAIMS.glob("*.toml") for run in experiment_of(path.stem).runs()
    }
    wrong = [(run, [*contradictions(each, planned[run])]) for run, each in read_all().items()]
    assert [(run, told) for run, told in wrong if told] == []
