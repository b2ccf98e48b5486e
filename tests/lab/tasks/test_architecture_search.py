"""Architecture search: two levels, what an interruption keeps, and what cannot be searched."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normkit.errors import NormkitError
from normkit.lab.experiment import Data, Run, Setting
from normkit.lab.experiment.records import Model, ModelStep, OwnCode, TaskSpec, Train
from normkit.lab.formats import ImageFormat
from normkit.lab.models.genotypes import Genotype
from normkit.lab.results import Result
from normkit.lab.tasks import load_sets, make_task
from normkit.lab.tasks.architecture_search import ArchitectureSearch
from normkit.lab.train import Training
from normkit.lab.train.batches import EpochPlan
from normkit.lab.train.cuda_graph import WARM_UP, Action
from normkit.lab.train.step import Trainer

TWO = ["max_pool_3x3", "skip_connect"]  # quick ones


def setting(**options: Any) -> Setting:
    return Setting(
        Data("synthetic:1x8x8x3x40", validation=0.5, flip=True),
        Model("native:darts_search", options={"cells": 3, "channels": 2, "nodes": 1}
              | {"operations": TWO}),
        (ModelStep("norm", "bn"),),
        Train(epochs=2, batch=8, lr=0.05, drop_last=True),
        task=TaskSpec("architecture-search", {"lr": 0.05, **options}),
    )  # fmt: skip


def finished(training: Training) -> Result:
    while training.step():
        pass
    return training.result()


@pytest.mark.parametrize("order", [1, 2])
def test_a_search_that_is_interrupted_anywhere_ends_with_the_same_cells(order: int) -> None:
    """In the middle of an epoch, and in the middle of an evaluation."""
    searched = setting(order=order)
    run, sets = Run(searched, 1), load_sets(searched)
    whole = Training(run, sets)
    states = {}
    for piece in range(1, 100):
        if not whole.step():
            break
        if piece in (1, 3)[: 3 - order]:  # the second ends the steps of the first epoch
            state = whole.state_dict()
            states[piece] = {**state, "machine": copied(state["machine"])}
    expected = whole.result()
    for state in states.values():
        again = Training(run, sets)
        again.load_state_dict(state)
        result = finished(again)
        assert dropped_times(result) == dropped_times(expected)
        assert torch.equal(
            again.trainer.model.architecture,  # type: ignore[arg-type]
            whole.trainer.model.architecture,  # type: ignore[arg-type]
        )
    found = Genotype.of(whole.trainer.model.genotype())  # type: ignore[operator]
    assert expected.texts["to train them"] == found.to_toml()
    assert Result.from_json(expected.to_json()).texts == expected.texts
    last = expected.epochs[-1]
    assert last.validation_accuracy is not None
    assert 0 < last.metrics["test_undecided"] < 1


def test_a_recorded_step_takes_back_its_warm_up() -> None:
    """Whatever a step of a search changes is in the list of what it changes: see ``Recorded``."""
    searched = dataclasses.replace(setting(), train=Train(epochs=1, batch=8, drop_last=True))
    run, sets = Run(searched, 1), load_sets(searched)

    def called(action: Action) -> Action:
        for _ in range(WARM_UP):
            action()
        return action

    plain, recorded = Training(run, sets), Training(run, sets, capture=called)
    assert dropped_times(finished(recorded)) == dropped_times(finished(plain))
    assert recorded.trainer.is_recorded


def test_a_found_cell_is_trained_and_goes_on_with_the_same_drop_path() -> None:
    found = {"normal": [["skip_connect", 0], ["max_pool_3x3", 1]]}
    found["reduce"] = found["normal"]
    options = {"genotype": found, "cells": 3, "channels": 2, "auxiliary": True, "drop_path": 0.9}
    trained = dataclasses.replace(
        setting(), model=Model("native:darts", options=options), task=TaskSpec()
    )
    run, sets = Run(trained, 1), load_sets(trained)
    whole = Training(run, sets)
    while whole.progress().epochs < 1.5:
        whole.step()
    assert float(whole.trainer.model.drop_rate) == pytest.approx(0.45)  # type: ignore[arg-type]
    state = whole.state_dict()
    again = Training(run, sets)
    again.load_state_dict({**state, "machine": copied(state["machine"])})
    assert dropped_times(finished(again)) == dropped_times(finished(whole))


def test_an_auxiliary_head_counts_by_its_weight() -> None:
    class Two(nn.Module):
        def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
            return torch.zeros(len(images), 3), images.flatten(1)[:, :3]

    images, labels = torch.randn(4, 1, 8, 8), torch.tensor([0, 1, 2, 0])
    losses = []
    for weight in (0.0, 0.4):
        chosen = dataclasses.replace(
            setting(), task=TaskSpec("classification", {"auxiliary": weight})
        )
        task = make_task(chosen)
        task.attach(
            chosen, load_sets(chosen), ImageFormat(torch.device("cpu"), "float32", False), 1
        )
        losses.append(task.loss(Two(), (images, labels))["loss"])  # type: ignore[index, call-overload]
    expected = nn.functional.cross_entropy(images.flatten(1)[:, :3], labels)
    assert losses[0] == pytest.approx(math.log(3))
    assert losses[1] - losses[0] == pytest.approx(0.4 * float(expected), rel=1e-5)


def copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: copied(each) for key, each in value.items()}
    if isinstance(value, list):
        return [copied(each) for each in value]
    return value.clone() if isinstance(value, Tensor) else value


def dropped_times(result: Result) -> list[Any]:
    return [dataclasses.replace(epoch, seconds=0.0) for epoch in result.epochs]


class Toy(nn.Module):
    """Smooth, with a norm between, and architecture parameters that scale two paths."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 5), nn.Linear(64, 5)
        self.norm = nn.BatchNorm1d(5)
        self.last = nn.Linear(5, 3)
        self.architecture = nn.Parameter(torch.tensor([0.3, -0.2]))

    def architecture_parameters(self) -> list[nn.Parameter]:
        return [self.architecture]

    def forward(self, images: Tensor) -> Tensor:
        x = images.flatten(1)
        paths = torch.stack([self.first(x).tanh(), self.second(x).sigmoid()])
        mixed = (torch.softmax(self.architecture, 0)[:, None, None] * paths).sum(0)
        logits: Tensor = self.last(self.norm(mixed))
        return logits


def searching(order: int, momentum: float) -> tuple[ArchitectureSearch, Trainer, Any]:
    chosen = dataclasses.replace(
        setting(order=order, lr=0.1),
        train=Train(batch=8, lr=0.2, momentum=momentum, weight_decay=0.01, precision="float64"),
    )
    task, sets = make_task(chosen), load_sets(chosen)
    assert isinstance(task, ArchitectureSearch)
    task.attach(chosen, sets, ImageFormat(torch.device("cpu"), "float64", False), 1)
    task._architecture_names = {"architecture"}
    plan = EpochPlan.of(chosen.train, len(sets.train))
    trainer = Trainer(Toy(), chosen.train, plan, task, None)
    trainer.rates.write(0)
    return task, trainer, task.read(*next(iter(task.batches(plan, 0, 0))))


def test_second_order_gradients_are_those_of_a_step_ahead() -> None:
    """Against autograd through the step itself, which a large network could not afford."""
    task, trainer, (seen, aside) = searching(2, momentum=0.9)
    model = trainer.model
    names = [name for name, _ in model.named_parameters() if name != "architecture"]
    values = dict(model.named_parameters())
    for weight in task.weights:  # as if a step had been done before
        trainer.optimizer.state[weight]["momentum_buffer"].normal_()
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}

    def loss(parameters: dict[str, Tensor], batch: Any) -> Tensor:
        logits = torch.func.functional_call(model, {**parameters, **copied(buffers)}, (batch[0],))
        return nn.functional.cross_entropy(logits, batch[1])

    slopes = torch.autograd.grad(loss(values, seen), [values[n] for n in names], create_graph=True)
    ahead = {"architecture": values["architecture"]}
    for name, slope in zip(names, slopes, strict=True):
        moved = trainer.optimizer.state[values[name]]["momentum_buffer"]
        ahead[name] = values[name] - 0.2 * (slope + 0.01 * values[name] + 0.9 * moved)
    (exact,) = torch.autograd.grad(loss(ahead, aside), [values["architecture"]])

    before = copied(dict(model.state_dict()))
    with task.statistics_kept():
        (estimated,) = task._unrolled(trainer, seen, aside)
    (direct,) = task._gradients(trainer.forward, aside, task.architecture)
    # the difference of two gradients errs by a third derivative times SMALL², 1e-4
    assert torch.allclose(estimated, exact, rtol=1e-3, atol=1e-6)
    assert not torch.allclose(direct, exact, rtol=1e-2)
    for name, value in model.named_parameters():
        assert torch.equal(value, before[name])


def test_a_step_moves_both_levels_and_leaves_statistics_to_training() -> None:
    task, trainer, batch = searching(1, momentum=0.0)
    model: Any = trainer.model
    (expected,) = task._gradients(model, batch[1], task.architecture)
    model.norm.reset_running_stats()
    first = model.architecture.detach().clone()
    task.step(trainer, batch)
    assert int(model.norm.num_batches_tracked) == 1  # the training batch, not the other one
    # the first step of Adam goes by lr against the sign, decay being small beside the gradient
    assert torch.allclose(model.architecture - first, -0.1 * expected.sign(), atol=1e-3)
    assert id(model.architecture) not in map(id, task.weights)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": Data("digits")}, r"data\.validation is 0\. Try data\.validation = 0\.5"),
        ({"train": Train(accumulate=2)}, r"train\.accumulate is 2"),
        ({"train": Train(precision="fp16")}, "Try bf16"),
        ({"task": TaskSpec("architecture-search", {"order": 3})}, "order is 3, expected 1 or 2"),
        ({"task": TaskSpec("architecture-search", {"order": 2}), "train": Train(optimizer="adam")},
         "order 2 looks a step of SGD ahead"),
        ({"data": Data("digits", validation=0.2)},
         r"an epoch has 36 search steps.* the validation set has 287"),
        ({"data": Data("digits", validation=0.01, subset=64)}, "the validation set has 14"),
        ({"data": Data("digits", subset=64)}, r"data\.validation is 0"),
    ],
)  # fmt: skip
def test_a_search_that_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    chosen = dataclasses.replace(setting(), train=Train(batch=32))
    chosen = dataclasses.replace(chosen, **changes)
    with pytest.raises(NormkitError, match=message):
        make_task(chosen).locate(chosen)


OWN = """
import torch
from torch.utils.data import DataLoader, TensorDataset

def make(loader=False):
    drawn = torch.Generator().manual_seed(1)
    parts = {}
    for name, samples in (("train", 16), ("validation", 16), ("test", 8)):
        images = torch.randn(samples, 1, 8, 8, generator=drawn)
        parts[name] = TensorDataset(images, torch.arange(samples) % 3)
        if loader:
            parts[name] = DataLoader(parts[name], batch_size=8)
    return {**parts, "classes": 3}
"""


def test_own_data_with_a_validation_set_is_searched_on(tmp_path: Path) -> None:
    (tmp_path / "mydata.py").write_text(OWN)
    chosen = dataclasses.replace(
        setting(),
        data=Data("mydata.py:make"),
        train=Train(epochs=1, batch=8),
        code=OwnCode(str(tmp_path)),
    )
    make_task(chosen).locate(chosen)
    result = finished(Training(Run(chosen, 1), load_sets(chosen)))
    assert result.epochs[-1].validation_accuracy is not None
    chosen = dataclasses.replace(chosen, data=Data("mydata.py:make", options={"loader": True}))
    with pytest.raises(NormkitError, match="comes in batches of its own"):
        Training(Run(chosen, 1), load_sets(chosen))


def test_a_network_without_a_choice_cannot_be_searched() -> None:
    chosen = dataclasses.replace(setting(), model=Model("native:small_cnn"))
    with pytest.raises(NormkitError, match="has no architecture_parameters and no genotype"):
        Training(Run(chosen, 1), load_sets(chosen))
