"""Runs side by side are runs alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from lab.train.stand_ins import network, numbers, run, sets
from normkit.errors import OptionError
from normkit.lab.experiment import Data, ModelStep, Run, Setting, Train
from normkit.lab.results import DIVERGED, Result
from normkit.lab.tasks.classification import Classification
from normkit.lab.train import Progress, Training, side_by_side, train, train_together
from normkit.lab.train.device import Randomness, RunDevice


def setting(norm: str, epochs: int = 2, **options: object) -> Setting:
    return Setting(
        Data("synthetic:1x8x8x3x60", flip=True),
        steps=(ModelStep("norm", norm),),
        train=Train(epochs=epochs, batch=16, lr=0.05, **options),  # type: ignore[arg-type]
    )


def without_company(result: Result | None) -> Result:
    assert result is not None
    said = {k: v for k, v in result.environment.items() if k != "side by side"}
    return numbers(Result(**{**vars(result), "environment": said}))


def test_side_by_side_is_alone() -> None:
    runs = [Run(setting("bn"), 1), Run(setting("gn", epochs=3), 1), Run(setting("ubn"), 2)]
    told: list[Progress] = []
    beside = train_together(runs, tell=told.append)
    assert [r.environment["side by side"] for r in beside if r] == ["3"] * 3
    for asked, found in zip(runs, beside, strict=True):
        assert without_company(found) == without_company(train(asked))
        epochs = [p.record for p in told if p.run == asked.id and p.record]
        assert found is not None
        assert tuple(epochs) == found.epochs


def test_random_numbers_are_not_shared() -> None:
    def alone(seed: int) -> Result:
        training = Training(run(seed), sets(), model=network(dropout=0.5))
        while training.step():
            pass
        return numbers(training.result())

    pair = [Training(run(seed), sets(), model=network(dropout=0.5)) for seed in (1, 2)]
    before = torch.get_rng_state()
    while not all(training.finished for training in pair):
        random.choice(pair).step()
    assert torch.equal(torch.get_rng_state(), before)  # the caller's stay where they were
    assert [numbers(training.result()) for training in pair] == [alone(1), alone(2)]


def test_a_run_draws_one_stream_of_numbers() -> None:
    numbers_of_its_own = Randomness(7, torch.device("cpu"))
    drawn = []
    for _ in range(3):
        torch.rand(5)
        with numbers_of_its_own.own():
            with numbers_of_its_own.again():
                torch.rand(4)
            drawn.append(torch.rand(2))
    torch.manual_seed(7)
    assert torch.equal(torch.cat(drawn), torch.cat([torch.rand(2) for _ in range(3)]))


def test_a_divergence_leaves_the_others_alone() -> None:
    # so many ones a rate of 1e38 turns into infinity
    runs = [Run(setting("bn"), 1), Run(setting("bn", momentum=0.0, clip=0.0), 1)]
    wild = Run(Setting(runs[0].setting.data, train=Train(epochs=9, batch=16, lr=1e38)), 1)
    fine, lost = train_together([runs[0], wild])
    assert lost is not None
    assert lost.status == DIVERGED
    assert without_company(fine) == without_company(train(runs[0]))


def test_stopped_and_resumed_side_by_side(tmp_path: Path) -> None:
    runs = [Run(setting("bn"), seed) for seed in (1, 2)]
    paths = [tmp_path / f"{r.id}.pt" for r in runs]
    asks = iter([False] * 5)
    assert train_together(runs, checkpoints=paths, stop=lambda: next(asks, True)) == [None, None]
    resumed = train_together(runs, checkpoints=paths)
    for asked, found in zip(runs, resumed, strict=True):
        assert without_company(found) == without_company(train(asked))


def test_a_result_is_told_when_it_is_there_not_when_all_are() -> None:
    """A crash in the last run of a group once took the results of the others with it."""
    runs = [Run(setting("bn", epochs=1), 1), Run(setting("bn", epochs=3), 1)]
    heard: list[str] = []

    def tell(progress: Progress) -> None:
        if progress.run == runs[1].id and progress.record:
            heard.append(f"epoch {progress.record.epoch}")

    found = train_together(runs, tell=tell, done=lambda result: heard.append(result.run))
    assert heard == ["epoch 1", runs[0].id, "epoch 2", "epoch 3", runs[1].id]
    assert [each.run for each in found if each] == [each.id for each in runs]


def test_a_checkpoint_for_each_run() -> None:
    with pytest.raises(OptionError, match="2 runs"):
        train_together([run(1), run(2)], checkpoints=[Path("one.pt")])


def test_a_place_without_a_gpu_has_no_records() -> None:
    assert RunDevice("cpu", 1).capture(lambda: None) == "there are no CUDA graphs on cpu"
    assert RunDevice("cpu", 1).peak_memory() is None


def test_a_task_makes_its_tensors_on_the_stream_of_its_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were made on the usual stream, for which the run's own does not wait any more."""
    inside: list[bool] = []
    attached: list[bool] = []
    plain = Classification.attach

    @contextmanager
    def on_stream(self: RunDevice) -> Iterator[None]:
        inside.append(True)
        yield
        inside.pop()

    def attach(*given: Any) -> None:
        attached.append(bool(inside))
        plain(*given)

    monkeypatch.setattr(RunDevice, "on_stream", on_stream)
    monkeypatch.setattr(Classification, "attach", attach)
    Training(run(1), sets(), model=network())
    assert attached == [True]


def test_how_many_side_by_side() -> None:
    assert side_by_side(setting("bn"), (3, 32, 32), "cpu") == 1
    small = Setting(train=Train(batch=16))
    large = Setting(train=Train(batch=256))
    assert side_by_side(large, (3, 224, 224), "cuda") == 1
    assert side_by_side(small, (1, 8, 8), "cuda") >= side_by_side(small, (3, 32, 32), "cuda") >= 1
    assert side_by_side(Setting(train=Train(batch=0)), (1, 8, 8), "cuda") == 1
