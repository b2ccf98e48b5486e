"""The store: claims, results, and files that are not what they should be."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from normkit.lab.experiment import Run, Setting
from normkit.lab.results import DONE, Epoch, Result
from normkit.lab.store import CLAIMED, FAILED, VERSION, WAITING, DiskFull, Owner, Store, StoreError

RUNS = [Run(Setting(), seed) for seed in (1, 2, 3)]
IDS = [run.id for run in RUNS]


def result(run: str, accuracy: float = 0.5) -> Result:
    epochs = (Epoch(1, test_accuracy=accuracy, measures={"esm": [0.1, None]}),)
    return Result(run, DONE, (1,), epochs, 2.5, 10, environment={"torch": "2"}, note="α")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "results" / "my.sqlite"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    with Store(path) as made:
        made.add(RUNS)
        yield made


@pytest.fixture
def owner(store: Store) -> Iterator[Owner]:
    made = Owner(store.folder)
    yield made
    made.close()


def test_a_result_comes_back_as_it_was(store: Store, path: Path) -> None:
    store.finish(result(IDS[1]))
    assert store.results() == {IDS[1]: result(IDS[1])}
    with Store(path) as again:
        assert again.results(IDS) == {IDS[1]: result(IDS[1])}
        assert again.results(IDS[:1]) == {}


def test_the_first_result_of_a_run_stays(store: Store) -> None:
    store.finish(result(IDS[0], 0.25))
    store.finish(result(IDS[0], 0.75))
    assert store.results()[IDS[0]].score("accuracy") == 0.25


def test_a_result_of_no_run_is_refused(store: Store) -> None:
    with pytest.raises(StoreError, match="has no run 0000"):
        store.finish(result("0000"))


def test_adding_runs_again_changes_nothing(store: Store, owner: Owner) -> None:
    store.finish(result(IDS[0]))
    assert store.claim(owner, IDS) == IDS[1]
    store.fail(IDS[2], "broken")
    before = store.status()
    store.add(RUNS)
    assert store.status() == before
    assert [before[run].state for run in IDS] == ["done", CLAIMED, FAILED]
    assert before[IDS[2]].reason == "broken"


def test_claims_follow_the_order_that_is_asked_for(store: Store, owner: Owner) -> None:
    order = [IDS[2], IDS[0]]
    assert [store.claim(owner, order) for _ in range(3)] == [IDS[2], IDS[0], None]
    assert store.claim(owner) == IDS[1]


def test_a_claim_holds_against_others_while_its_owner_lives(store: Store, owner: Owner) -> None:
    assert store.claim(owner, IDS) == IDS[0]
    other = Owner(store.folder)
    assert store.claim(other, IDS) == IDS[1]
    assert store.status()[IDS[0]].owner == owner.name
    other.close()
    assert store.status()[IDS[1]].state == WAITING
    assert store.claim(owner, IDS) == IDS[1]


def test_released_runs_are_free(store: Store, owner: Owner) -> None:
    claimed = [store.claim(owner, IDS) for _ in range(3)]
    store.release(owner, claimed[:1])  # type: ignore[arg-type]
    assert [store.status()[run].state for run in IDS] == [WAITING, CLAIMED, CLAIMED]
    store.release(owner)
    assert {each.state for each in store.status().values()} == {WAITING}


def test_failed_runs_wait_again_when_asked(store: Store, owner: Owner) -> None:
    store.fail(IDS[0], "broken")
    assert store.claim(owner, IDS[:1]) is None
    store.retry(IDS)
    assert store.claim(owner, IDS[:1]) == IDS[0]


def test_a_run_that_is_done_cannot_fail(store: Store) -> None:
    store.finish(result(IDS[0]))
    store.fail(IDS[0], "late")
    assert store.status()[IDS[0]].state == "done"


HOLDS = """
import os, sys, time
from pathlib import Path
from normkit.lab.store import Owner, Store
with Store(sys.argv[1]) as store:
    owner = Owner(store.folder)
    store.claim(owner, sys.argv[2:])
    if os.fork() == 0:  # as a worker: holds the lock, and outlives the launcher
        print(os.getpid(), flush=True)
    time.sleep(100)
"""


def test_a_claim_outlives_a_killed_launcher_until_its_workers_are_gone(
    store: Store, owner: Owner
) -> None:
    command = [sys.executable, "-c", HOLDS, str(store.path), *IDS]
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    worker = int(launcher.stdout.readline())
    assert store.claim(owner, IDS[:1]) is None
    launcher.kill()
    launcher.wait()
    assert store.claim(owner, IDS[:1]) is None
    os.kill(worker, 9)
    launcher.stdout.read()  # ends with the last process that holds it
    launcher.stdout.close()
    assert store.status()[IDS[0]].state == WAITING
    assert store.claim(owner, IDS[:1]) == IDS[0]


def test_forgetting(store: Store, owner: Owner) -> None:
    store.finish(result(IDS[0]))
    store.fail(IDS[1], "broken")
    store.claim(owner, IDS[2:])
    store.record_epochs([(IDS[1], Epoch(1))])
    store.checkpoint(IDS[1]).write_text("state")
    with pytest.raises(StoreError, match=r"in use by process \d+ on "):
        store.forget(IDS)
    assert set(store.results()) == {IDS[0]}
    store.release(owner)
    store.forget(IDS[:2])
    assert {each.state for each in store.status().values()} == {WAITING}
    assert store.results() == {}
    assert store.epochs(IDS[1]) == []
    assert not store.checkpoint(IDS[1]).exists()


def test_what_unfinished_runs_tell_is_kept_until_they_are_done(store: Store) -> None:
    told = [Epoch(1, train_loss=2.0), Epoch(2, train_loss=1.0)]
    store.record_epochs((IDS[0], epoch) for epoch in told)
    store.record_epochs([(IDS[0], told[1])])  # again, after a resumption
    assert store.epochs(IDS[0]) == told
    assert store.status()[IDS[0]].epoch == 2
    store.finish(result(IDS[0]))
    assert store.epochs(IDS[0]) == []


def test_files_of_a_run_go_when_it_is_done(store: Store, owner: Owner) -> None:
    for run in IDS[:2]:
        store.checkpoint(run).write_text("state")
        store.checkpoint(run).with_name(f".77.{run}.pt.half").write_text("sta")
    store.tidy(IDS[:1], keep_checkpoints=True)
    store.finish(result(IDS[1]))
    left = {file.name for file in store.folder.iterdir()}
    assert left == {f"{IDS[0]}.pt", f"{owner.name}.lock"}


def test_nothing_is_left_beside_a_store_that_is_done(path: Path) -> None:
    with Store(path) as store:
        Owner(store.folder).close()
    assert [file.name for file in path.parent.iterdir()] == ["my.sqlite"]


def test_eight_at_once_make_one_store(path: Path) -> None:
    errors: list[Exception] = []

    def open_and_add() -> None:
        try:
            with Store(path) as store:
                store.add(RUNS)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=open_and_add) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    with Store(path) as store:
        assert set(store.status()) == set(IDS)


def test_a_store_of_a_newer_version(path: Path) -> None:
    Store(path).close()
    change(path, f"UPDATE meta SET value = '{VERSION + 1}'")
    before = path.read_bytes()
    with pytest.raises(StoreError, match=rf"newer normkit.*version {VERSION + 1}.*--upgrade"):
        Store(path)
    assert path.read_bytes() == before


def test_a_database_of_another_program(path: Path) -> None:
    path.parent.mkdir()
    change(path, "CREATE TABLE songs (title TEXT)")
    with pytest.raises(StoreError, match=r"not a store of normkit. Try another --store"):
        Store(path)


@pytest.mark.parametrize("damage", ["text", "middle", "cut"])
def test_a_damaged_file(path: Path, damage: str) -> None:
    with Store(path) as store:
        store.add([Run(Setting(), seed) for seed in range(300)])
    whole = path.read_bytes()
    broken = {
        "text": b"accuracy, 0.5\n" * 100,
        "middle": whole[:5000] + b"\xff" * 9000 + whole[14000:],
        "cut": whole[: len(whole) // 2],
    }
    path.write_bytes(broken[damage])
    with pytest.raises(StoreError, match=r"my\.sqlite is damaged.*move it away"):
        Store(path)


def test_a_record_that_is_no_result(store: Store, path: Path) -> None:
    store.finish(result(IDS[0]))
    change(path, "UPDATE results SET record = '{\"epochs\": 3}'")
    with pytest.raises(StoreError, match=f"run {IDS[0]} that cannot be read"):
        store.results()


def test_a_store_that_is_not_there(path: Path) -> None:
    with pytest.raises(StoreError, match="There is no store"):
        Store(path, create=False)
    assert not path.exists()


def test_a_folder_in_place_of_a_store(path: Path) -> None:
    path.mkdir(parents=True)
    with pytest.raises(StoreError, match="could not be used as a store"):
        Store(path)


def test_a_full_disk(store: Store, path: Path) -> None:
    """SQLite's own limit on the file's size gives the error that a full disk gives."""
    store.finish(result(IDS[0]))
    pages = store._connection.execute("PRAGMA page_count").fetchone()[0]
    store._connection.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(DiskFull, match=r"my\.sqlite could not be written.*make room"):
        store.add(Run(Setting(), seed) for seed in range(1000, 2000))
    store._connection.execute("PRAGMA max_page_count = 1000000")
    assert set(store.status()) == set(IDS)  # all of it or nothing
    store.finish(result(IDS[1]))
    assert set(store.results()) == set(IDS[:2])


def change(path: Path, statement: str) -> None:
    connection = sqlite3.connect(path)
    connection.execute(statement)
    connection.commit()
    connection.close()
