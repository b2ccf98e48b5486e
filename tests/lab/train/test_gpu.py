"""What only a GPU can show: recorded steps, streams, and that nobody waits."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import normkit as nk
from lab.train.stand_ins import numbers, until_epoch_ends
from normkit.core.precision import deterministic_cudnn
from normkit.lab.data import load
from normkit.lab.experiment import Data, Model, ModelStep, Run, Setting, Train
from normkit.lab.experiment.records import TaskSpec
from normkit.lab.results import DONE, Result
from normkit.lab.train import Training, train, train_together
from normkit.lab.train.cuda_graph import waiting_is_an_error

pytestmark = pytest.mark.gpu

DATA = Data("synthetic:3x16x16x4x500", flip=True, crop=2)
MICRO = ModelStep("norm", "bcn", options={"groups": 4, "micro": True})
VARIANTS: dict[str, tuple[ModelStep, ...]] = {
    "torch": (),
    "bn": (ModelStep("norm", "bn"),),
    "gn": (ModelStep("norm", "gn", options={"groups": 4}),),
    "ubn": (ModelStep("norm", "ubn"),),
    "rbn": (ModelStep("norm", "rbn"),),
    "micro bcn, ws": (MICRO, ModelStep("weights", "ws")),
}
# of a loss after some steps: each rounds anew, and errors grow with training
NEAR = {"float32": 1e-3, "bf16": 0.05, "fp16": 0.01}


@pytest.fixture(autouse=True)
def _repeatable() -> Iterator[None]:
    with deterministic_cudnn():
        yield


def setting(variant: str = "bn", model: str = "native:resnet20", **options: Any) -> Setting:
    usual: dict[str, Any] = {"epochs": 2, "batch": 64, "lr": 0.02, "channels_last": True}
    return Setting(DATA, Model(model), VARIANTS[variant], Train(**{**usual, **options}))


def finished(run: Run, **options: Any) -> Training:
    training = Training(run, load(run.setting.data, "cuda"), device="cuda", **options)
    while training.step():
        pass
    return training


def scores(result: Result | None) -> list[tuple[float | None, ...]]:
    assert result is not None
    return [(e.train_loss, e.train_accuracy, e.test_loss, e.test_accuracy) for e in result.epochs]


@pytest.mark.parametrize("precision", ["float32", "bf16", "fp16"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_replayed_step_is_a_step(variant: str, precision: str) -> None:
    run = Run(setting(variant, precision=precision), 1)
    replayed, called = finished(run), finished(run, capture=None)
    assert replayed.result().environment["recorded"] == "yes"
    assert called.result().environment["recorded"].startswith("no")
    for mine, theirs in zip(replayed.records, called.records, strict=True):
        assert mine.train_loss == pytest.approx(theirs.train_loss, rel=NEAR[precision])
        assert mine.test_loss == pytest.approx(theirs.test_loss, rel=NEAR[precision])
    assert replayed.records[1].train_loss != replayed.records[0].train_loss


@pytest.mark.parametrize("options", [{"accumulate": 3, "batch": 20}, {"optimizer": "adamw"}])
def test_accumulation_and_adam_are_replayed_too(options: dict[str, Any]) -> None:
    run = Run(setting("gn", **{"lr": 0.01, **options}), 1)
    replayed, called = finished(run), finished(run, capture=None)
    assert replayed.trainer.is_recorded
    for mine, theirs in zip(replayed.records, called.records, strict=True):
        assert mine.train_loss == pytest.approx(theirs.train_loss, rel=NEAR["float32"])


def test_the_rate_is_read_anew_at_every_replay() -> None:
    # a step at the rate 0 changes no weight, whatever rate the record was made with
    run = Run(setting(schedule="step", milestones=(1,), factor=1e-30, weight_decay=0.0), 1)
    training = Training(run, load(DATA, "cuda"), device="cuda")
    until_epoch_ends(training)
    before = [p.detach().clone() for p in training.trainer.model.parameters()]
    until_epoch_ends(training)
    after = list(training.trainer.model.parameters())
    assert all(torch.equal(p, q) for p, q in zip(before, after, strict=True))
    assert training.trainer.is_recorded


def test_micro_batch_layers_see_the_rate_of_the_step() -> None:
    training = finished(Run(setting("micro bcn, ws", schedule="cosine"), 1))
    rates = [float(m.rate) for m in training.trainer.model.modules() if isinstance(m, nk.BCN)]
    last = training.trainer.rates.base_rate(2 * training.plan.steps - 1)
    assert rates == pytest.approx([last] * 19, rel=1e-6)


def test_the_same_run_twice() -> None:
    run = Run(setting(precision="bf16"), 1)
    assert scores(finished(run).result()) == scores(finished(run).result())


class Dropping(torch.nn.Sequential):
    """Draws random numbers in every step."""

    def __init__(self) -> None:
        super().__init__(
            torch.nn.Conv2d(3, 8, 3, stride=2),
            torch.nn.BatchNorm2d(8),
            torch.nn.ReLU(),
            torch.nn.Flatten(),
            torch.nn.Dropout(0.5),
            torch.nn.Linear(8 * 49, 4),
        )


def test_random_numbers_are_each_run_s_own() -> None:
    def made(seed: int) -> Training:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = Dropping()
        run = Run(setting("torch"), seed)
        return Training(run, load(DATA, "cuda"), device="cuda", model=model)

    alone = []
    for seed in (1, 2, 3):
        training = made(seed)
        while training.step():
            pass
        alone.append(scores(training.result()))
    beside = [made(seed) for seed in (1, 2, 3)]
    before = torch.cuda.get_rng_state()
    while any([training.step() for training in beside]):  # noqa: C419 (each must step)
        pass
    assert torch.equal(torch.cuda.get_rng_state(), before)
    assert [scores(training.result()) for training in beside] == alone
    assert alone[0] != alone[1]


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_side_by_side_is_alone(precision: str) -> None:
    runs = [Run(setting(v, precision=precision), s) for v in ("bn", "ubn") for s in (1, 2)]
    beside = train_together(runs, device="cuda")
    for run, found in zip(runs, beside, strict=True):
        assert scores(found) == scores(train(run, device="cuda"))


@pytest.mark.parametrize("precision", ["float32", "bf16", "fp16"])
@pytest.mark.parametrize("variant", ["bn", "ubn", "micro bcn, ws"])
def test_resumed_is_undisturbed(variant: str, precision: str, tmp_path: Path) -> None:
    run = Run(setting(variant, precision=precision), 1)
    expected = train(run, device="cuda")
    for moment in (3, 11):  # in the middle of the first epoch, and of the second
        path, asks = tmp_path / f"{moment}.pt", iter([False] * moment)
        assert train(run, device="cuda", checkpoint=path, stop=lambda a=asks: next(a, True)) is None
        resumed = train(run, device="cuda", checkpoint=path)
        assert resumed is not None
        assert expected is not None
        assert scores(resumed) == scores(expected)
        assert numbers(resumed).selected == expected.selected


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("capture", ["auto", None])
def test_nobody_waits_but_at_the_end_of_an_epoch(variant: str, capture: Any) -> None:
    run = Run(setting(variant, epochs=3, precision="bf16"), 1)
    training = Training(run, load(DATA, "cuda"), device="cuda", capture=capture)
    until_epoch_ends(training)  # records, compiles and lays out memory
    evaluations = 1  # batches: the test set is small
    with waiting_is_an_error():
        for _ in range(training.plan.steps + evaluations):
            assert training.step()
    assert training.epoch == 1
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            training.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert training.epoch == 2
    waits = [str(each.message) for each in told if "synchronizing" in str(each.message)]
    assert len(waits) <= 1 + evaluations  # what the epoch and what each evaluation summed up


NORMS = [name for name in nk.names("activation") if name not in ("dn",)]  # dn links fixed batches


@pytest.mark.parametrize("name", NORMS)
def test_every_normalizer_trains(name: str) -> None:
    usual = setting(model="native:small_cnn", drop_last=True)
    groups = {"groups": 4} if name == "bgn" else {}  # without, it says that it is batch norm
    step = ModelStep("norm", name, options=groups)
    run = Run(Setting(DATA, usual.model, (step,), usual.train), 1)
    replayed, called = finished(run).result(), finished(run, capture=None).result()
    assert replayed.status == called.status == DONE
    # which of them cannot be recorded is said, never hidden
    assert replayed.environment["recorded"].startswith(("yes", "no: a step waits"))
    assert replayed.epochs[-1].train_loss == pytest.approx(
        called.epochs[-1].train_loss, rel=NEAR["float32"]
    )


@pytest.mark.parametrize("order", [1, 2])
def test_a_search_of_two_levels_is_recorded(order: int) -> None:
    usual = setting(model="native:darts_search", drop_last=True)
    model = replace(usual.model, options={"cells": 3, "channels": 4, "nodes": 2})
    task = TaskSpec("architecture-search", {"order": order})
    data = replace(DATA, validation=0.5)
    searched = Setting(data, model, (ModelStep("norm", "gn"),), usual.train, task=task)
    run = Run(searched, 1)
    replayed, called = finished(run).result(), finished(run, capture=None).result()
    assert replayed.environment["recorded"] == "yes"
    assert replayed.epochs[-1].train_loss == pytest.approx(
        called.epochs[-1].train_loss, rel=NEAR["float32"]
    )


def test_adversarial_steps_are_recorded() -> None:
    # several passes and gradients of the images in one record, from a new random start each time
    attacked = replace(setting(), task=TaskSpec("adversarial", {"judge_steps": 2}))
    attacked = replace(attacked, model=Model("native:wrn", options={"depth": 10, "width": 1}))
    run = Run(attacked, 1)
    replayed, called = finished(run).result(), finished(run, capture=None).result()
    assert replayed.environment["recorded"] == "yes"
    # random starts are drawn in another order: as near as two seeds of one setting are
    assert replayed.epochs[-1].train_loss == pytest.approx(called.epochs[-1].train_loss, rel=0.1)


def test_time_and_memory_are_recorded() -> None:
    result = finished(Run(setting(), 1)).result()
    assert result.seconds > 0
    assert result.peak_memory is not None
    assert result.peak_memory > 4 * result.parameters
    assert math.isfinite(result.images_per_second or math.nan)
    assert result.environment["device"] == torch.cuda.get_device_name()


def test_a_step_that_waits_is_called_and_says_so() -> None:
    class Waits(Dropping):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = super().forward(x)
            return y if y.sum().item() == 0 else y * 1

    run = Run(setting("torch"), 1)
    training = Training(run, load(DATA, "cuda"), device="cuda", model=Waits())
    while training.step():
        pass
    result = training.result()
    assert result.status == DONE
    assert result.environment["recorded"].startswith("no: a step waits for the GPU")
