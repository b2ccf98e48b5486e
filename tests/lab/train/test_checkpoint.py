"""A run that is interrupted comes to the numbers it would have had."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import normkit as nk
from forked import CAN_FORK
from lab.train.stand_ins import network, numbers, run, sets, until_epoch_ends
from normkit.catalog import ENTRIES
from normkit.lab.data import load
from normkit.lab.experiment import Data, ModelStep, Run, Setting, Train, Watch
from normkit.lab.results import Result
from normkit.lab.train import Training, train
from normkit.lab.train.checkpoint import Checkpointer, StaleCheckpoint, read, write


def undisturbed(asked: Run, model: Any) -> Result:
    training = Training(asked, sets(validation=6), model=model())
    while training.step():
        pass
    return numbers(training.result())


def interrupted(asked: Run, model: Any, path: Path, moments: list[int]) -> Result:
    """Killed after each of some numbers of pieces of work, each time with a new process's eyes."""
    for moment in moments:
        training = Training(asked, sets(validation=6), model=model())
        Checkpointer(path).resume(training)
        if not all(training.step() for _ in range(moment)):
            break
        Checkpointer(path).save(training)
        torch.manual_seed(random.getrandbits(32))  # a new process has other random numbers
    training = Training(asked, sets(validation=6), model=model())
    assert Checkpointer(path).resume(training)
    while training.step():
        pass
    return numbers(training.result())


OPTIONS: list[dict[str, Any]] = [
    {},
    {"accumulate": 3, "batch": 2},
    {"optimizer": "adamw", "lr": 0.01},
    {"precision": "fp16", "clip": 1.0},
    {"precision": "bf16", "channels_last": True},
    {"select": "best_validation", "schedule": "step", "milestones": (1, 2), "warmup": 0.5},
    {"data": Data(mixup=0.4), "label_smoothing": 0.1},
    {"watch": Watch(measures=("condensation", "esm"), every=2)},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_killed_at_random_moments(options: dict[str, Any], tmp_path: Path) -> None:
    asked = run(epochs=4, **options)
    model = lambda: network(dropout=0.3)  # noqa: E731
    expected = undisturbed(asked, model)
    for attempt in range(2):
        path = tmp_path / f"{attempt}.pt"
        moments = [random.randint(1, 9) for _ in range(random.randint(1, 4))]
        assert interrupted(asked, model, path, moments) == expected, moments


NORMS = [name for name in ENTRIES if name in nk.names("activation")]


@pytest.mark.parametrize("name", NORMS)
def test_every_normalizer_is_resumed_exactly(name: str, tmp_path: Path) -> None:
    def model() -> nn.Module:
        options = {"in_": {}, "dn": {"batch": 2}}.get(name, {})
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(1)
            return nn.Sequential(
                nn.Conv2d(2, 8, 3, padding=1),
                nk.make(name, 8, **options),
                nn.Flatten(),
                nn.Linear(200, 3),
            )

    asked = run(epochs=2, batch=8, drop_last=True)
    expected = undisturbed(asked, model)
    assert interrupted(asked, model, tmp_path / "run.pt", [3]) == expected


def test_a_training_can_go_back_in_its_own_life(tmp_path: Path) -> None:
    # a recorded step must not be torn from its tensors: everything is written in place
    training = Training(run(), sets(), model=network())
    for _ in range(2):
        training.step()
    write(training.state_dict(), tmp_path / "run.pt")
    for _ in range(4):
        training.step()
    training.load_state_dict(read(tmp_path / "run.pt"))
    while training.step():
        pass
    plain = Training(run(), sets(), model=network())
    while plain.step():
        pass
    assert numbers(training.result()) == numbers(plain.result())


def test_going_back_over_a_milestone_sets_the_rate_of_layers_too(tmp_path: Path) -> None:
    def model() -> nn.Module:
        return network(lambda c: nk.BCN(c, groups=2, micro=True))

    asked = run(epochs=2, schedule="step", milestones=(1,), factor=0.01)
    training = Training(asked, sets(), model=model())
    until_epoch_ends(training)
    write(training.state_dict(), tmp_path / "run.pt")  # layers still have the first rate
    training.step()
    training.load_state_dict(read(tmp_path / "run.pt"))
    while training.step():
        pass
    plain = Training(asked, sets(), model=model())
    while plain.step():
        pass
    assert numbers(training.result()) == numbers(plain.result())


def test_seconds_of_all_parts_are_added(tmp_path: Path) -> None:
    training = Training(run(), sets(), model=network())
    until_epoch_ends(training)
    training.step()
    state = training.state_dict()
    assert state["seconds"] > training.records[0].seconds
    again = Training(run(), sets(), model=network())
    again.load_state_dict(state)
    while again.step():
        pass
    assert again.result().seconds > state["seconds"]


# ------------------------------------------------------------------------------------ files


def test_stop_leaves_a_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "a.pt"
    asked = Run(Setting(Data("synthetic:1x8x8x3x60"), train=run(epochs=3).setting.train), 1)
    asks = iter([False] * 4)
    assert train(asked, checkpoint=path, stop=lambda: next(asks, True)) is None
    assert read(path)["at"] == 5
    resumed = train(asked, checkpoint=path)
    alone = train(asked)
    assert resumed is not None
    assert alone is not None
    assert numbers(resumed) == numbers(alone)


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    write({"number": 1}, path)
    with pytest.raises(OSError, match="local object"):  # a local function cannot be written
        write({"large": torch.zeros(1000), "bad": lambda: None}, path)
    assert read(path) == {"number": 1}
    assert os.listdir(tmp_path) == ["run.pt"]


def test_two_workers_that_write_one_checkpoint_do_not_meet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers of two machines with one process number once wrote into each other's half file."""
    path, save = tmp_path / "run.pt", torch.save

    def interrupted(state: object, file: Any) -> None:
        monkeypatch.setattr(torch, "save", save)
        write({"number": 2}, path)  # the other worker's, from beginning to end
        save(state, file)

    monkeypatch.setattr(torch, "save", interrupted)
    monkeypatch.setattr(os, "getpid", lambda: 1)
    write({"number": 1}, path)
    assert read(path) == {"number": 1}
    assert os.listdir(tmp_path) == ["run.pt"]


def test_a_damaged_file_is_told_and_the_run_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    training = Training(run(), sets(), model=network())
    Checkpointer(path).save(training)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.warns(UserWarning, match="cannot be read"):
        assert not Checkpointer(path).resume(training)


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    Checkpointer(path).save(Training(run(1), sets(), model=network()))
    other = Training(run(2), sets(), model=network())
    with pytest.raises(StaleCheckpoint, match="made with run"):
        other.load_state_dict(read(path))
    with pytest.warns(UserWarning, match="begins anew"):
        assert not Checkpointer(path).resume(other)


def test_a_checkpoint_of_another_device_is_refused() -> None:
    training = Training(run(), sets(), model=network())
    state = {**training.state_dict(), "device": "another GPU"}
    with pytest.raises(StaleCheckpoint, match="another GPU"):
        training.load_state_dict(state)


def test_checkpoints_are_not_written_too_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    keeper = Checkpointer(tmp_path / "run.pt", every=30)
    assert not keeper.due()
    now += 30
    assert keeper.due()

    class Slow:
        def state_dict(self) -> dict[str, Any]:
            nonlocal now
            now += 3  # seconds to write: then at least 150 pass, a fiftieth for writing
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    keeper.save(Slow())
    now += 149
    assert not keeper.due()
    now += 1
    assert keeper.due()
    assert not Checkpointer(None).due()


def test_kill_9_in_the_middle(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    setting = Setting(
        Data("synthetic:1x8x8x3x200", flip=True, crop=1),
        steps=(ModelStep("norm", "ubn"),),
        train=Train(epochs=400, batch=16, lr=0.05),
    )
    how = {"checkpoint": path, "save_every": 0.01}
    context = multiprocessing.get_context("fork" if CAN_FORK else "spawn")
    process = context.Process(target=train, args=(Run(setting, 1),), kwargs=how, daemon=True)
    process.start()
    limit = time.monotonic() + 240  # of a busy machine
    while not path.exists() and time.monotonic() < limit:
        time.sleep(0.02)
    time.sleep(random.uniform(0, 0.1))
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    reached = read(path)
    # the same number of steps without an interruption
    plain = Training(Run(setting, 1), load(setting.data))
    while (plain.epoch, plain.at) != (reached["epoch"], reached["at"]):
        assert plain.step()
    mine = plain.trainer.state_dict()
    for name, tensor in mine["model"].items():
        assert torch.equal(tensor, reached["machine"]["model"][name]), name
    told = [record["train_loss"] for record in reached["records"]]
    assert told == [record.train_loss for record in plain.records]
