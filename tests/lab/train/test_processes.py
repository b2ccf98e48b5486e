"""Runs that two processes train together, against the one process that simulates them."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forked import CAN_FORK, Forked
from normkit.errors import OptionError
from normkit.lab.experiment import Data, Model, ModelStep, Run, Setting, Train
from normkit.lab.results import Result
from normkit.lab.train import processes, train
from normkit.lab.train.processes import ProcessLost, companion
from normkit.lab.train.share import BatchShare

# 51 samples: batches of 8, and a last one of 3, in which the second process has nothing
DATA = Data("synthetic:1x8x8x3x51", flip=True, crop=1)
TRAIN = Train(epochs=2, batch=8, lr=0.05, precision="float64", warmup=0.5, clip=1.0)


def run(*steps: ModelStep, **changes: Any) -> Run:
    return Run(Setting(DATA, Model(), steps, replace(TRAIN, **changes)), 1)


def trained(run: Run, **given: Any) -> Result:
    result = train(run, **given)
    assert result is not None
    return result


def close(ours: Result, theirs: Result) -> None:
    """Up to rounding: sums in float64, in another order, through some 14 steps."""
    assert len(ours.epochs) == len(theirs.epochs) == TRAIN.epochs
    for a, b in zip(ours.epochs, theirs.epochs, strict=True):
        for name in ("train_loss", "train_accuracy", "test_loss", "test_accuracy"):
            assert math.isclose(getattr(a, name), getattr(b, name), rel_tol=1e-9), name


def fork_companions(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on: a companion that is started as users' are takes five seconds to come up."""
    if CAN_FORK:
        started = SimpleNamespace(Popen=lambda *_, **__: Forked(companion), PIPE=None)
        monkeypatch.setattr(processes, "subprocess", started)


BN = ModelStep("norm", "bn")


def test_two_processes_are_what_worker_batch_simulates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted in the second epoch, they go on to the same numbers."""
    steps, file = iter(range(100)), tmp_path / "run.pt"
    stopped = train(run(BN, gpus=2), checkpoint=file, save_every=0.0, stop=lambda: next(steps) >= 9)
    assert stopped is None
    assert file.exists()
    fork_companions(monkeypatch)
    together = trained(run(BN, gpus=2), checkpoint=file)
    close(together, trained(run(BN, worker_batch=4)))
    assert together.environment["processes"] == "2"
    other = trained(run(BN))  # and the statistics do make a difference
    assert abs(other.epochs[-1].test_loss - together.epochs[-1].test_loss) > 1e-6


def test_synchronized_statistics_are_those_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    fork_companions(monkeypatch)
    steps = (ModelStep("norm", "bcn", options={"groups": 4}),)
    said = {"accumulate": 2, "drop_last": True}
    together = trained(run(*steps, gpus=2, statistics="synchronized", **said))
    close(together, trained(run(*steps, **said)))


def test_a_process_that_is_lost_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "normkit.lab.train.processes.START", "import os, signal; os.kill(os.getpid(), 9)"
    )
    monkeypatch.setattr("normkit.lab.train.processes.PATIENCE", timedelta(seconds=1))
    with pytest.raises(ProcessLost, match=r"Process 2 of 2 of the run ended \(SIGKILL\)"):
        train(run(gpus=2))


def test_shares_of_a_batch() -> None:
    own = [BatchShare(Train(batch=12, gpus=3), rank) for rank in range(3)]
    assert [share.bounds_in(12) for share in own] == [(0, 4), (4, 8), (8, 12)]
    assert [share.bounds_in(5) for share in own] == [(0, 4), (4, 5), (5, 5)]
    even = [
        BatchShare(Train(batch=12, gpus=3, statistics="synchronized"), rank) for rank in range(3)
    ]
    assert [share.bounds_in(5) for share in even] == [(0, 1), (1, 3), (3, 5)]
    given = (torch.arange(5), {"boxes": ["a", "b", "c", "d", "e"], "size": 3})
    taken = own[1].take(given, 5)
    assert taken[0].tolist() == [4]
    assert taken[1] == {"boxes": ["e"], "size": 3}
    assert own[1].weight == 1 / 5
    with pytest.raises(OptionError, match="expects tensors that begin with the 5 samples"):
        own[1].take((torch.zeros(3, 2),), 5)
