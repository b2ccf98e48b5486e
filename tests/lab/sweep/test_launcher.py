"""What the launcher makes of what it is told, with an engine that plays the workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from lab.sweep import pretend
from normkit.errors import OptionError
from normkit.lab.experiment import Experiment
from normkit.lab.results import Epoch
from normkit.lab.store import FAILED, WAITING, Owner, Store
from normkit.lab.sweep import ProgressListener
from normkit.lab.sweep.launcher import TRIES, Interrupts, Launcher
from normkit.lab.sweep.local import worker_slots
from normkit.lab.sweep.messages import Failed, Finished, Job, Message, Progressed, WorkerLost

Answer = Callable[[Sequence[Job]], list[Message]]


class Played:
    """One worker with room for four runs; ``answer`` says what becomes of them."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.groups: list[list[Job]] = []
        self.told: list[Message] = []

    def size(self) -> int:
        return 1

    def room(self) -> int:
        return 0 if self.told else 4

    def start(self, jobs: Sequence[Job]) -> None:
        self.groups.append(list(jobs))
        self.told += self.answer(jobs)

    def poll(self, seconds: float) -> list[Message]:
        told, self.told = self.told, []
        return told

    def stop(self) -> None: ...
    def close(self) -> None: ...


def done(job: Job) -> Message:
    result = pretend.train(job.run)
    assert result is not None
    return Finished(result)


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    with Store(path) as made:
        yield made


def sweep(experiment: Experiment, store: Store, answer: Answer) -> Played:
    engine = Played(answer)
    runs = {run.id: run for run in experiment.runs()}
    store.add(runs.values())
    owner = Owner(store.folder)
    try:
        Launcher(runs, store, owner, engine, ProgressListener()).sweep(Interrupts())
    finally:
        store.release(owner)
        owner.close()
    return engine


def test_runs_of_one_setting_are_given_together(store: Store) -> None:
    experiment = pretend.experiment(variants=2, seeds=6)
    engine = sweep(experiment, store, lambda jobs: [done(job) for job in jobs])
    assert [len(group) for group in engine.groups] == [4, 4, 2, 2]
    for group in engine.groups:
        assert all(job.run.setting == group[0].run.setting for job in group)
    assert len(store.results()) == 12


@pytest.mark.parametrize("kind", ["broke", "lost"])
def test_after_trouble_in_company_runs_are_trained_alone(store: Store, kind: str) -> None:
    def answer(jobs: Sequence[Job]) -> list[Message]:
        if len(jobs) == 1:
            return [done(job) for job in jobs]
        if kind == "lost":
            return [WorkerLost(job.run.id, "gone", ready=True, shared=True) for job in jobs]
        return [Failed(job.run.id, "no memory", shared=True) for job in jobs]

    engine = sweep(pretend.experiment(variants=1, seeds=4), store, answer)
    assert [len(group) for group in engine.groups] == [4, 1, 1, 1, 1]
    assert len(store.results()) == 4


@pytest.mark.parametrize("progress", [False, True])
def test_only_losses_without_progress_count(store: Store, progress: bool) -> None:
    """A machine that kills a worker now and then delays a run; one that kills it always ends it."""
    tries = 0

    def answer(jobs: Sequence[Job]) -> list[Message]:
        nonlocal tries
        tries += 1
        (job,) = jobs
        if tries > 2 * TRIES + 2:
            return [done(job)]
        epoch = tries if progress else 1  # it comes further every time, or never
        told = Progressed(job.run.id, float(epoch), Epoch(epoch))
        return [told, WorkerLost(job.run.id, "gone", ready=True)]

    sweep(pretend.experiment(variants=1, seeds=1), store, answer)
    (state,) = store.status().values()
    if progress:
        assert state.state == "done"
    else:
        assert state.state == FAILED
        assert tries == 1 + TRIES
        assert state.reason == f"lost its worker {TRIES + 1} times without progress: gone"


def test_a_second_signal_is_an_order(store: Store) -> None:
    interrupts = Interrupts()
    interrupts._note(2, None)
    with pytest.raises(KeyboardInterrupt):
        interrupts._note(2, None)
    runs = {run.id: run for run in pretend.experiment().runs()}
    store.add(runs.values())
    owner = Owner(store.folder)
    engine = Played(lambda jobs: [])
    with pytest.raises(KeyboardInterrupt):
        Launcher(runs, store, owner, engine, ProgressListener()).sweep(interrupts)
    owner.close()
    assert engine.groups == []
    assert {each.state for each in store.status().values()} == {WAITING}


def test_a_run_on_several_gpus_gets_a_worker_for_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 5)
    assert [slot.device for slot in worker_slots(gpus=2)] == ["cuda:0", "cuda:2"]
    assert [slot.device for slot in worker_slots(device="cuda:3", gpus=2)] == ["cuda:3"]
    with pytest.raises(OptionError, match=r"train\.gpus = 8, and torch sees 5 CUDA devices"):
        worker_slots(gpus=8)
    assert len(worker_slots(device="cpu", gpus=1000)) == 1
