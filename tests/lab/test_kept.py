"""What a store keeps beside results, and that it can be read where it cannot be written.

A colleague's results lay in a folder that only they could write: lab status and lab report answered
"unable to open database file", and a copy of the file alone lacked what the write-ahead log held.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from normkit.lab.experiment import Experiment, Run, Setting, Train, Variant
from normkit.lab.experiment.records import OwnCode
from normkit.lab.provenance import checkout_commit, command_line, software, with_provenance
from normkit.lab.results import DONE, Epoch, Result
from normkit.lab.store import (
    CLAIMED,
    FAILED,
    WAITING,
    Owner,
    Reader,
    Store,
    StoredExperiment,
    StoreError,
)

RUNS = [Run(Setting(), seed) for seed in (1, 2, 3)]
IDS = [run.id for run in RUNS]
NOBODY = 65534


def result(run: str) -> Result:
    return Result(run, DONE, (1,), (Epoch(1, test_accuracy=0.5),), 2.5, 10)


@pytest.fixture
def folder() -> Iterator[Path]:
    """Where anybody can look: pytest's own folders are closed to others."""
    made = Path(tempfile.mkdtemp())
    made.chmod(0o755)
    yield made
    made.chmod(0o755)
    shutil.rmtree(made)


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """A folder that cannot be written; for root, who may write everywhere, as somebody else."""
    for path in (*folder.rglob("*"), folder):
        path.chmod(0o555 if path.is_dir() else 0o444)
    if root := os.geteuid() == 0:
        os.seteuid(NOBODY)
    try:
        with pytest.raises(OSError, match="denied"):
            (folder / "new").touch()
        yield
    finally:
        if root:
            os.seteuid(0)
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o755)


def test_a_store_that_cannot_be_written_is_read(folder: Path) -> None:
    path = folder / "my.sqlite"
    with Store(path) as store:
        store.add(RUNS)
        store.finish(result(IDS[0]))
    with Reader(path) as store:
        assert len(store.results()) == 1
    assert [file.name for file in folder.iterdir()] == ["my.sqlite"]  # a reader leaves nothing
    with read_only(folder), Reader(path) as store:
        assert store.results() == {IDS[0]: result(IDS[0])}
        assert store.status()[IDS[1]].state == WAITING
    assert [file.name for file in folder.iterdir()] == ["my.sqlite"]


def test_with_a_log_of_a_launcher_that_was_killed(folder: Path) -> None:
    path = folder / "live.sqlite"
    with Store(path) as store:
        store.add(RUNS)
        store.finish(result(IDS[0]))
        # as a kill leaves it: results that are in the log only
        for ending in ("", "-wal"):
            shutil.copy(f"{path}{ending}", folder / f"killed.sqlite{ending}")
    alone = sqlite3.connect(f"file:{folder}/killed.sqlite?immutable=1", uri=True)
    with pytest.raises(sqlite3.Error):  # the tables themselves are in the log
        alone.execute("SELECT * FROM results")
    alone.close()
    with read_only(folder), Reader(folder / "killed.sqlite") as store:
        assert store.results() == {IDS[0]: result(IDS[0])}
    left = sorted(file.name for file in folder.iterdir())
    assert left == ["killed.sqlite", "killed.sqlite-wal", "live.sqlite"]


def test_while_a_launcher_is_at_work(folder: Path) -> None:
    path = folder / "my.sqlite"
    with Store(path) as store:
        store.add(RUNS)
        owner = Owner(store.folder)
        store.claim(owner, IDS)
        with read_only(folder), Reader(path) as reader:
            assert reader.status()[IDS[0]].state == CLAIMED
        os.close(owner.lock)  # it dies
        with read_only(folder), Reader(path) as reader:
            assert reader.status()[IDS[0]].state == WAITING


def test_training_into_such_a_store_is_refused_in_words(folder: Path) -> None:
    path = folder / "my.sqlite"
    with Store(path) as store:
        store.add(RUNS)
    with read_only(folder), pytest.raises(StoreError, match=r"my\.sqlite"), Store(path) as store:
        store.add([Run(Setting(), 9)])


def test_the_log_of_a_failed_run_stays_until_it_is_done(folder: Path) -> None:
    with Store(folder / "my.sqlite") as store:
        store.add(RUNS)
        store.fail(IDS[0], "ValueError: odd", "Traceback …\nValueError: odd\n")
        store.fail(IDS[1], "lost its worker")
        assert store.log(IDS[0]) == "Traceback …\nValueError: odd\n"
        assert store.log(IDS[1]) == "lost its worker"
        assert store.log(IDS[2]) == ""
        store.retry(IDS)
        assert store.log(IDS[0]).startswith("Traceback")
        store.finish(result(IDS[0]))
        store.fail(IDS[0], "too late", "too late")
        assert store.log(IDS[0]) == ""
        assert store.status()[IDS[1]].state == WAITING != FAILED


def test_a_store_of_the_first_release_is_read_and_gets_what_it_lacks(folder: Path) -> None:
    path = folder / "old.sqlite"
    with Store(path) as store:
        store.add(RUNS)
        store.finish(result(IDS[0]))
    old = sqlite3.connect(path)
    old.execute("DROP TABLE logs")
    old.execute("DROP TABLE experiments")
    old.commit()
    old.close()
    with Reader(path) as reader:
        assert reader.log(IDS[0]) == ""
        assert reader.experiments() == []
        assert reader.results() == {IDS[0]: result(IDS[0])}
    with Store(path) as store:
        store.fail(IDS[1], "odd", "a log")
        assert store.log(IDS[1]) == "a log"


def test_experiments_are_remembered_once_the_latest_last(folder: Path) -> None:
    def asked(epochs: int) -> StoredExperiment:
        setting = Setting(train=Train(epochs=epochs))
        cell = (("train.epochs", epochs), ("train.milestones", (1, 2)))
        made = Experiment("mine", "Mine", (Variant("bn", setting, cell),), (1, 2), "bn")
        return StoredExperiment.of(made, "a text")

    with Store(folder / "my.sqlite") as store:
        for epochs in (2, 3):
            store.remember(asked(epochs))
        # written in the same millisecond, or before the clock was set back
        with sqlite3.connect(folder / "my.sqlite") as base:
            base.execute("UPDATE experiments SET saved = '2999-12-31 23:00:00.000'")
        store.remember(asked(2))
        first, last = store.experiments()
    assert dict(first.variants[0].cell)["train.epochs"] == 3
    assert last.variants == asked(2).variants
    assert last.variants[0].runs == tuple(
        Run(Setting(train=Train(epochs=2)), seed).id for seed in (1, 2)
    )
    assert last.saved > first.saved


def test_what_a_run_is_made_of_comes_back(folder: Path) -> None:
    with Store(folder / "my.sqlite") as store:
        store.add(RUNS)
        assert store.contents([IDS[1], "unknown"]) == {IDS[1]: RUNS[1].content()}


def test_provenance_of_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/usr/bin/normkit", "lab", "run", "my file.toml"])
    assert command_line() == "normkit lab run 'my file.toml'"
    own = Run(Setting(code=OwnCode("here", {"mine.py:Task": "12ab"})), 1)
    noted = with_provenance(Result(own.id, DONE, (), (), 1.0, 1), own)
    assert noted.provenance == {"command": command_line(), "code": "mine.py:Task 12ab"}
    assert Result.from_json(noted.to_json()) == noted
    assert {"normkit", "numpy", "torchvision"} <= software().keys()


def test_the_commit_of_a_checkout_and_of_none(tmp_path: Path) -> None:
    package = tmp_path / "src" / "normkit"
    package.mkdir(parents=True)
    assert checkout_commit(package) == ""
    (package / "a.py").write_text("x = 1\n")
    who = "-c user.name=a -c user.email=a@b"
    for command in ("init -q", "add .", f"{who} commit -q -m first"):
        assert os.system(f"git -C {tmp_path} {command}") == 0
    commit = checkout_commit(package)
    assert len(commit) == 12
    (package / "a.py").write_text("x = 2\n")
    assert checkout_commit(package) == f"{commit} with changes"
