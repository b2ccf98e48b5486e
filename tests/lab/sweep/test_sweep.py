"""A sweep with processes of the usual kind, and what it is made of."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from forked import CAN_FORK
from lab.sweep import pretend
from lab.sweep.nursery import Forked
from normkit.errors import OptionError, UnknownName
from normkit.lab.experiment import Experiment
from normkit.lab.results import DIVERGED, DONE, Epoch, Result
from normkit.lab.store import Store
from normkit.lab.sweep import ProgressLines, ProgressListener, SweepError, SweepPlan, local, run
from normkit.lab.sweep.messages import Failed, Finished, Job, Message, Progressed, Stopped
from normkit.lab.sweep.progress import TimeLeft, run_labels
from normkit.lab.sweep.worker import JobRunner, disk_full_cause

PRETEND: dict[str, Any] = {"device": "cpu", "trainer": "lab.sweep.pretend"}
# where those of the usual kind have been tried
QUICKLY: dict[str, Any] = {**PRETEND, **({"start": Forked} if CAN_FORK else {})}


def never(end: int, lock: int, log: int) -> Any:
    raise AssertionError("a worker was started")


def scores(results: list[Result]) -> dict[str, float | None]:
    return {result.run: result.score("accuracy") for result in results}


def expected(experiment: Experiment) -> dict[str, float]:
    return {run.id: pretend.expected(run) for run in experiment.runs()}


def test_only_what_is_missing_is_trained(path: Path) -> None:
    small, large = pretend.experiment(seeds=1), pretend.experiment(seeds=2, variants=4)
    with Store(path) as store:
        lines: list[str] = []
        first = run(small, store, workers=2, progress=ProgressLines(lines.append), **PRETEND)
        assert [result.run for result in first] == [each.id for each in small.runs()]
        assert scores(first) == expected(small)
        assert lines[0] == "3 runs; 2 at once"
        assert "v1, seed 1: accuracy 88.97%" in "".join(lines)
        assert scores(run(small, store, start=never, **PRETEND)) == scores(first)
        lines.clear()
        more = run(large, store, workers=1, progress=ProgressLines(lines.append), **QUICKLY)
        assert scores(more) == expected(large)
        assert lines[0] == "8 runs, 3 done before; 1 at once"
        assert len(lines) == 1 + 5


def test_several_experiments_are_one_queue(path: Path) -> None:
    """A sweep is one experiment's: with several, workers waited for the last run of each."""
    first, second = pretend.experiment(variants=1), pretend.experiment(variants=2, epochs=2)
    second = dataclasses.replace(second, name="second", seeds=(7,), metric="error")
    with Store(path) as store:
        lines: list[str] = []
        said = ProgressLines(lines.append)
        assert (
            run([first, second], store, seconds=0, workers=2, start=never, progress=said, **PRETEND)
            == []
        )
        assert lines == [
            "4 runs; 2 at once",
            "The time is over. The same command goes on from here.",
        ]
        lines.clear()
        results = run([first, second], store, workers=1, progress=said, **QUICKLY)
    assert scores(results) == expected(first) | expected(second)
    names = [re.sub(r"^\[.*\] | [\d.]+%$", "", line) for line in lines[1:]]
    assert names == [
        "pretended: v0, seed 1: accuracy",
        "second: v0, seed 7: error",
        "second: v1, seed 7: error",
        "pretended: v0, seed 2: accuracy",
    ]


def test_a_worker_that_cannot_start_ends_the_sweep(path: Path) -> None:
    def broken(end: int, lock: int, log: int) -> Any:
        command = [sys.executable, "-S", "-c", "import sys; sys.exit('no such [thing]')"]
        return subprocess.Popen(command, stderr=log, pass_fds=(end,))

    with Store(path) as store:
        said = r"do not start: the worker process ended \(exit code 1\): no such \[thing\]"
        with pytest.raises(SweepError, match=said):
            run(pretend.experiment(), store, workers=1, start=broken, **PRETEND)
        assert {each.state for each in store.status().values()} == {"waiting"}


def test_an_engine_that_is_not_known(path: Path) -> None:
    with Store(path) as store, pytest.raises(UnknownName, match="Did you mean 'ray'"):
        run(pretend.experiment(), store, engine="rai", **PRETEND)


def test_worker_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "cores", lambda: 3)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert [each.device for each in local.worker_slots()] == ["cpu"] * 3
    with pytest.raises(OptionError, match="torch sees 0 CUDA devices"):
        local.worker_slots(device="cuda")
    with pytest.raises(OptionError, match="device got 'gpu'"):
        local.worker_slots(device="gpu")
    with pytest.raises(OptionError, match="'meta', which cannot train here"):
        local.worker_slots(device="meta")
    with pytest.raises(OptionError, match="workers got 0, expected 1 or more"):
        local.worker_slots(workers=0)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert [each.device for each in local.worker_slots()] == ["cuda:0", "cuda:1"]
    assert [each.device for each in local.worker_slots(3)] == ["cuda:0", "cuda:1", "cuda:0"]
    assert [each.device for each in local.worker_slots(device="cuda:1")] == ["cuda:1"]
    assert {each.together for each in local.worker_slots()} == {local.TOGETHER}


class Served:
    """A runner in this process, and what it sent."""

    def __init__(self, folder: Path) -> None:
        self.sent: list[Message] = []
        self.stops = False
        self.folder = folder
        self.runner = JobRunner("lab.sweep.pretend", "cpu", self.sent.append, lambda: self.stops)

    def serve(self, experiment: Experiment) -> bool:
        self.runs = experiment.runs()
        return self.runner.run([Job(run, self.folder / f"{run.id}.pt") for run in self.runs])

    def kinds(self, kind: type[Message]) -> list[Any]:
        return [message for message in self.sent if isinstance(message, kind)]


@pytest.fixture
def served(tmp_path: Path) -> Served:
    return Served(tmp_path)


def test_several_runs_of_a_setting_train_side_by_side(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups: list[int] = []
    together = pretend.train_together

    def noted(runs: Any, **given: Any) -> Any:
        groups.append(len(runs))
        return together(runs, **given)

    monkeypatch.setattr(pretend, "train_together", noted)
    experiment = pretend.experiment(variants=1, seeds=7)
    assert served.serve(experiment)
    assert groups == [3, 3]  # as side_by_side says; the last one is alone
    assert scores([done.result for done in served.kinds(Finished)]) == expected(experiment)
    epochs = [(told.run, told.record.epoch) for told in served.kinds(Progressed) if told.record]
    assert len(epochs) == len(set(epochs)) == 7 * 3


def test_an_error_beside_others_is_nobodys_yet(served: Served) -> None:
    experiment = pretend.experiment(variants=2, seeds=4, fails_in=2)
    troubled = dataclasses.replace(experiment, variants=experiment.variants[1:])
    assert not served.serve(troubled)
    assert [each.shared for each in served.kinds(Failed)] == [True] * 3
    assert len(served.kinds(Stopped)) == 1  # the fourth, which had not begun
    served.sent.clear()
    assert not served.serve(dataclasses.replace(troubled, seeds=(1,)))
    assert [each.shared for each in served.kinds(Failed)] == [False]


def test_an_error_beside_others_takes_no_finished_run_with_it(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks_at_the_end(runs: Any, **given: Any) -> Any:
        together([runs[0]], **{**given, "checkpoints": given["checkpoints"][:1]})
        raise RuntimeError("the third one does not fit into memory")

    together = pretend.train_together
    monkeypatch.setattr(pretend, "train_together", breaks_at_the_end)
    assert not served.serve(pretend.experiment(variants=1, seeds=3))
    first, *others = [run.id for run in served.runs]
    assert [each.result.run for each in served.kinds(Finished)] == [first]
    assert [each.run for each in served.kinds(Failed)] == others


def test_a_runner_that_is_asked_to_stop_leaves_everything(served: Served) -> None:
    served.stops = True
    assert served.serve(pretend.experiment(variants=1))
    assert [each.run for each in served.kinds(Stopped)] == [run.id for run in served.runs]
    assert len(served.sent) == 2


def test_what_a_full_disk_looks_like() -> None:
    full = OSError(28, "No space left on device")
    assert disk_full_cause(full) is full
    behind = RuntimeError("unexpected pos 127616 vs 127504")  # as torch.save says it
    behind.__context__ = full
    assert disk_full_cause(behind) is full
    writer = RuntimeError("PytorchStreamWriter failed writing file data/0")
    assert disk_full_cause(writer) is writer
    assert disk_full_cause(OSError(2, "No such file or directory")) is None
    assert disk_full_cause(ValueError("full")) is None


class Clock:
    """Time that passes when a test says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_time_left() -> None:
    experiment = pretend.experiment(variants=2, seeds=2, epochs=10)
    plan = SweepPlan(run_labels(experiment), workers=2)
    a1, b1, a2, b2 = plan.labels
    clock = Clock()
    left = TimeLeft(plan, clock)
    assert left.seconds() is None
    for each in (a1, b1):
        left.started(each)
    clock.now = 3.0  # seconds to start
    for each in (a1, b1):
        left.progressed(Progressed(each, 0.0))
    clock.now = 23.0
    left.progressed(Progressed(b1, 5.0, Epoch(5)))  # 4 s an epoch
    left.progressed(Progressed(a1, 10.0, Epoch(10)))  # 2 s
    left.over(a1)
    # 20 s of b1, 3 + 20 s of a2, 3 + 40 s of b2, on two workers
    assert left.seconds() == 43.0
    left.over(b1)
    left.over(a2)
    left.started(b2)
    clock.now += 2.0
    assert left.seconds() == 41.0  # of its start, 2 s are over
    clock.now += 1.0
    left.progressed(Progressed(b2, 0.0))
    clock.now += 4.0
    left.progressed(Progressed(b2, 1.0))
    assert left.seconds() == 36.0  # one run keeps one worker busy


def test_time_left_of_small_runs() -> None:
    """Of runs of a few seconds most is start and evaluation, of which nothing was counted: the
    time left was an eighth of what it turned out to be."""
    experiment = pretend.experiment(variants=4, seeds=5, epochs=5)
    plan = SweepPlan(run_labels(experiment), workers=1)
    clock = Clock()
    left, told = TimeLeft(plan, clock), []
    for each in plan.labels:
        left.started(each)
        clock.now += 1.2 if told else 5.0  # the first one starts a process, too
        left.progressed(Progressed(each, 0.05))
        for epoch in range(1, 6):
            clock.now += 0.1 + 0.25  # training, evaluation
            left.progressed(Progressed(each, float(epoch), Epoch(epoch, seconds=0.1 * epoch)))
        left.over(each)
        told.append((clock.now, left.seconds()))
    for now, seconds in told[2:-1]:
        assert seconds == pytest.approx(clock.now - now, rel=0.1)
    assert told[-1][1] == 0


def test_time_left_with_runs_side_by_side() -> None:
    experiment = pretend.experiment(variants=1, seeds=8, epochs=10)
    plan = SweepPlan(run_labels(experiment), workers=1)
    clock = Clock()
    left = TimeLeft(plan, clock)
    runs = list(plan.labels)
    for each in runs[:4]:  # on a GPU, by one worker
        left.started(each)
        left.progressed(Progressed(each, 0.0))
    clock.now = 40.0
    for each in runs[:4]:
        left.progressed(Progressed(each, 10.0, Epoch(10)))
        left.over(each)
    assert left.seconds() == 40.0


def test_lines_tell_of_divergences_collapses_and_failures() -> None:
    experiment = pretend.experiment(variants=1, seeds=3)
    first, second, third = (run.id for run in experiment.runs())
    lines: list[str] = []
    watcher: ProgressListener = ProgressLines(lines.append)
    watcher.begin(SweepPlan(run_labels(experiment)))
    watcher.finished(Result(first, DIVERGED, (), (), 1.0, 1, note="in epoch 2"))
    watcher.failed(second, "memory")
    chance = (Epoch(1, test_accuracy=0.1, test_one_class=1.0),)
    watcher.finished(Result(third, DONE, (1,), chance, 1.0, 1, classes=10, test_samples=500))
    watcher.end()
    assert [line.partition("] ")[2] for line in lines[1:]] == [
        "v0, seed 1: diverged in epoch 2",
        "v0, seed 2: failed: memory",
        "v0, seed 3: collapsed: the same answer to every test sample, 10.0% of them right",
    ]
