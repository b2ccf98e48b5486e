"""What goes wrong during a sweep, and what is left of it: everything that was done."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lab.sweep import pretend
from lab.sweep.nursery import Nursery
from normkit.lab.store import FAILED, WAITING, Reader, RunState, Store

SLOW = {"variants": 3, "seeds": 2, "epochs": 10, "seconds": 0.02}  # 0.8 s a run


class Sweeps:
    """Launches of one experiment on one store."""

    def __init__(self, nursery: Nursery, path: Path, journal: Path) -> None:
        self.nursery, self.path, self.journal = nursery, path, journal

    def launch(self, **wanted: Any) -> int:
        return self.nursery.launch(self.path, **wanted)

    def finish(self, **wanted: Any) -> int:
        """The exit status of a whole sweep."""
        return self.nursery.wait(self.launch(**wanted))

    def log(self) -> str:
        return self.path.with_suffix(".log").read_text()

    def states(self, **wanted: Any) -> list[RunState]:
        with Store(self.path) as store:
            status = store.status()
        return [status[run.id] for run in pretend.experiment(**wanted).runs()]

    def are_right(self, **wanted: Any) -> bool:
        """Whether every run has its result."""
        runs = pretend.experiment(**wanted).runs()
        with Store(self.path) as store:
            results = store.results()
        expected = {run.id: pretend.expected(run) for run in runs}
        return {run: each.score("accuracy") for run, each in results.items()} == expected

    def steps(self, **wanted: Any) -> dict[str, list[int]]:
        """For every run, which process did each of its steps."""
        done: dict[str, list[int]] = {run.id: [] for run in pretend.experiment(**wanted).runs()}
        for line in self.journal.read_text().splitlines():
            process, run = line.split()
            if run in done:
                done[run].append(int(process))
        return done

    def until(self, happens: Callable[[], bool]) -> None:
        end = time.monotonic() + 60
        while not happens():
            assert time.monotonic() < end, "it does not happen"
            time.sleep(0.01)


@pytest.fixture
def sweeps(nursery: Nursery, path: Path, journal: Path) -> Sweeps:
    journal.write_text("")
    return Sweeps(nursery, path, journal)


def test_a_lost_worker_costs_no_step(sweeps: Sweeps) -> None:
    wanted = {"dies_once_in": 2}
    assert sweeps.finish(**wanted) == 0
    assert sweeps.are_right(**wanted)
    assert "the worker process ended (SIGKILL" in sweeps.log()
    assert {len(steps) for steps in sweeps.steps(**wanted).values()} == {3 * pretend.STEPS}


def test_a_run_whose_worker_is_always_lost(sweeps: Sweeps) -> None:
    wanted = {"dies_in": 2, "seeds": 1}
    assert sweeps.finish(**wanted) == 1
    first, second, third = sweeps.states(**wanted)
    assert (first.state, second.state, third.state) == ("done", FAILED, "done")
    lost = "lost its worker 4 times without progress: the worker process ended (SIGKILL"
    assert second.reason.startswith(lost)


def test_an_error_fails_its_run_only_and_is_tried_again_next_time(sweeps: Sweeps) -> None:
    wanted = {"fails_once_in": 3, "seeds": 1}
    assert sweeps.finish(**wanted) == 1
    states = sweeps.states(**wanted)
    assert [each.state for each in states] == ["done", FAILED, "done"]
    assert states[1].reason.startswith("RuntimeError: the sum is odd (pretend.py:")
    with Reader(sweeps.path) as store:
        log = store.log(states[1].run)
    assert log.startswith("Traceback (most recent call last):")
    assert 'raise RuntimeError("the sum' in log
    assert log.endswith("Printed by its process:\nabout to fail in epoch 3\n")
    assert sweeps.finish(**wanted) == 0
    assert sweeps.are_right(**wanted)


def test_an_error_that_was_written_to_be_read_is_told_as_it_is(sweeps: Sweeps) -> None:
    wanted = {"refuses_in": 1, "seeds": 1}
    assert sweeps.finish(**wanted) == 1
    assert sweeps.states(**wanted)[1].reason == "lr got −1, expected more."


def test_no_room_for_a_checkpoint(sweeps: Sweeps) -> None:
    wanted = {"full_once_in": 2}
    assert sweeps.finish(**wanted) == 2
    assert "could not be written: OSError: [Errno 28] No space left on device" in sweeps.log()
    assert "Try to make room on that disk, then the same command again" in sweeps.log()
    assert FAILED not in [each.state for each in sweeps.states(**wanted)]
    status = 2
    while status == 2:  # each of the troubled runs meets a full disk once
        status = sweeps.finish(**wanted)
    assert status == 0
    assert sweeps.are_right(**wanted)


def test_no_room_for_results(sweeps: Sweeps) -> None:
    wanted = {"variants": 5, "seeds": 4, "epochs": 2}  # more than fits into the limit
    assert sweeps.finish(largest=150_000, **wanted) == 2
    assert "store.sqlite could not be written" in sweeps.log()
    with Store(sweeps.path) as store:
        before = store.results()
        assert 0 < len(before) < 20
        assert FAILED not in {each.state for each in store.status().values()}
    assert sweeps.finish(**wanted) == 0
    assert sweeps.are_right(**wanted)


def test_two_launchers_share_the_work(sweeps: Sweeps) -> None:
    launchers = [sweeps.launch(**SLOW) for _ in range(2)]
    assert [sweeps.nursery.wait(each) for each in launchers] == [0, 0]
    assert sweeps.are_right(**SLOW)
    steps = sweeps.steps(**SLOW)
    assert {len(each) for each in steps.values()} == {10 * pretend.STEPS}  # nothing twice
    processes = {process for each in steps.values() for process in each}
    assert len(processes) == 4  # two workers each


def test_what_a_killed_launcher_had_is_taken_over_by_another(sweeps: Sweeps) -> None:
    wanted = {**SLOW, "seeds": 1}
    first = sweeps.launch(workers=1, **wanted)
    sweeps.until(lambda: bool(sweeps.journal.read_text()))
    second = sweeps.launch(workers=1, **wanted)
    os.kill(first, signal.SIGKILL)
    assert sweeps.nursery.wait(first) == -signal.SIGKILL
    assert sweeps.nursery.wait(second) == 0
    assert sweeps.are_right(**wanted)
    assert len({process for each in sweeps.steps(**wanted).values() for process in each}) == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_sweep_goes_on_where_it_was(sweeps: Sweeps, number: signal.Signals) -> None:
    launcher = sweeps.launch(**SLOW)
    sweeps.until(lambda: sweeps.journal.read_text().count("\n") > 20)
    os.kill(launcher, number)
    assert sweeps.nursery.wait(launcher) == 130
    assert "Stopping: the runs write their checkpoints." in sweeps.log()
    assert {each.state for each in sweeps.states(**SLOW)} == {WAITING}
    folder = sweeps.path.with_name("store.sqlite.runs")
    assert {file.suffix for file in folder.iterdir()} == {".pt"}
    assert sweeps.finish(**SLOW) == 0
    assert sweeps.are_right(**SLOW)
    assert {len(each) for each in sweeps.steps(**SLOW).values()} == {10 * pretend.STEPS}
    assert not folder.exists()
