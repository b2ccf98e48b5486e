"""Adversarial training: attacks that stay within ε, and networks that are judged under them."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normkit.errors import MissingExtra, NormkitError, OptionError
from normkit.lab.experiment import Data, Run, Setting
from normkit.lab.experiment.records import Model, ModelStep, TaskSpec, Train
from normkit.lab.formats import ImageFormat
from normkit.lab.tasks import load_sets, make_task
from normkit.lab.tasks.adversarial import Adversarial
from normkit.lab.train import Training

STRONG = {"epsilon": 0.1, "step": 0.05}


def setting(**options: object) -> Setting:
    return Setting(
        Data("digits", subset=64, normalize="halves"),
        Model("native:small_cnn"),
        (ModelStep("norm", "bn"),),
        Train(epochs=1, batch=32, lr=0.05),
        task=TaskSpec("adversarial", {**STRONG, "judge_steps": 3, **options}),
    )


def attached(**options: object) -> Adversarial:
    task = make_task(setting(**options))
    assert isinstance(task, Adversarial)
    format = ImageFormat(torch.device("cpu"), "float32", False)
    task.attach(setting(**options), load_sets(setting()), format, 1)
    return task


def test_one_epoch_is_trained_and_judged() -> None:
    small = dataclasses.replace(setting(), data=Data("synthetic:1x8x8x3x40"))
    training = Training(Run(small, 1), load_sets(small))
    while training.step():
        pass
    result = training.result()
    last = result.epochs[-1]
    robust, clean = last.test("robust_accuracy"), last.test("accuracy")
    assert 0 <= robust <= clean <= 1
    assert result.selected == (1,)
    assert len(result.pictures) == 3
    assert result.pictures[0]["caption"].startswith("class ")


class Brightness(nn.Module):
    """Class 1 for bright images: the gradient points from black to white everywhere."""

    def forward(self, images: Tensor) -> Tensor:
        bright = images.mean((1, 2, 3))
        return torch.stack([-bright, bright], dim=1)


def test_an_attack_goes_as_far_as_it_may_and_stays_an_image() -> None:
    task = attached()
    images, _ = next(load_sets(setting()).test.batches(8))
    darker = task.attack(Brightness(), images, torch.ones(8, dtype=torch.long), steps=4)
    # halves: pixels from 0 to 1 are −1 to 1, so that ε = 0.1 is 0.2; digits have 16 as white
    expected = (images - 0.2).clamp(min=-1)
    assert torch.allclose(darker, expected, atol=1e-6)
    assert not darker.requires_grad


def test_a_single_step_is_on_the_grid_of_its_random_start() -> None:
    task = attached()
    images = torch.zeros(4, 1, 8, 8)
    labels = torch.zeros(4, dtype=torch.long)
    found = [task.attack(Brightness(), images, labels, steps=1) for _ in range(2)]
    assert not torch.equal(*found)
    assert all((each.abs() <= 0.2 + 1e-6).all() for each in found)


def test_gradients_of_parameters_are_left_alone_and_modes_come_back() -> None:
    task = attached()
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.LazyLinear(10))
    images, labels = next(load_sets(setting()).test.batches(8))
    model(images)
    means = model[1].running_mean.clone()
    losses = task.loss(model, (images, labels))
    assert model[1].training
    assert all(p.grad is None for p in model.parameters())
    moved = model[1].running_mean - means
    # the attack ran in eval mode: the one training forward has moved the mean once
    assert int(model[1].num_batches_tracked) == 2
    assert moved.any()
    assert losses["loss"].requires_grad  # type: ignore[index, call-overload]
    every = attached(attack_mode="train")
    every.loss(model, (images, labels))
    assert int(model[1].num_batches_tracked) == 2 + 4 + 1


def test_the_loss_of_test_images_is_the_one_that_is_trained() -> None:
    task = attached(judge_steps=1)
    task.criterion = lambda logits, labels: logits.sum() * 0 + 7.0
    score = task.evaluation("test")
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    score.add(model, next(load_sets(setting()).test.batches(8)))
    assert score.values()["loss"] == 7.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epsilon": 0}, r"epsilon is 0, expected a share .* try the task classification"),
        ({"epsilon": 2}, "epsilon is 2, expected a share"),
        ({"step": 0.3}, r"step is 0\.3, expected more than 0 and at most"),
        ({"steps": 0}, "steps is 0, expected 1 or more"),
        ({"attack_mode": "evaluate"}, "attack_mode is 'evaluate'.*eval"),
        ({"judge": "auto"}, "judge is 'auto'.*autoattack"),
    ],
)
def test_an_attack_that_is_none_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make_task(setting(**options))


class Rounded(nn.Module):
    def forward(self, images: Tensor) -> Tensor:
        return torch.zeros(len(images), 10) + images.detach().mean()


def test_a_model_without_gradients_is_told_before_training() -> None:
    with pytest.raises(NormkitError, match="No gradient of the loss reaches the images"):
        make_task(setting()).try_model(Rounded(), 2, 10, (1, 8, 8))


def test_data_without_black_and_white_cannot_be_attacked() -> None:
    sets = load_sets(setting())
    other = dataclasses.replace(sets, train=[1, 2])  # type: ignore[arg-type]
    task = make_task(setting())
    with pytest.raises(OptionError, match="does not say what black and white are"):
        task.attach(setting(), other, ImageFormat(torch.device("cpu"), "float32", False), 1)


def test_foolbox_attacks_as_far(monkeypatch: pytest.MonkeyPatch) -> None:
    task = attached(judge="foolbox", judge_steps=4)
    images, _ = next(load_sets(setting()).test.batches(4))
    labels = torch.ones(4, dtype=torch.long)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "foolbox", None)
        with pytest.raises(MissingExtra, match=r"normkit\[tasks\]"):
            task.judged(Brightness(), images, labels)
    pytest.importorskip("foolbox")
    darker = task.judged(Brightness(), images, labels)
    assert torch.allclose(darker, (images - 0.2).clamp(min=-1), atol=1e-5)


class Linear(nn.Module):
    """Of ten classes; what is attacked, and how far, can be told from its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.fc(images.flatten(1))
        return logits


def test_autoattack_finds_what_there_is_and_leaves_the_network_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    task = attached(epsilon=0.02, step=0.02)
    task.judge = "autoattack"
    with monkeypatch.context() as patch:  # told before anything trains
        patch.setitem(sys.modules, "pyautoattack", None)
        with pytest.raises(MissingExtra, match=r"normkit\[autoattack\]"):
            task.check_judge(10)
    library = pytest.importorskip("pyautoattack")
    chosen = library.AutoAttack._set_version

    def quick(self: Any, version: str) -> None:
        chosen(self, version)
        for each in (self.apgd, self.apgd_targeted, self.fab):
            each.n_iter = 10
        self.square.n_queries = 20

    monkeypatch.setattr(library.AutoAttack, "_set_version", quick)
    with pytest.raises(OptionError, match="the likeliest 4 classes, and there are 3"):
        task.check_judge(3)
    torch.manual_seed(0)  # with which two of six images withstand
    model = Linear()
    images = 0.5 * torch.rand(6, 1, 8, 8)
    labels = model(images).argmax(1)
    attacked = task.judged(model, images, labels)
    right = model(attacked).argmax(1) == labels
    # pixels may move by 0.04 here, and those of an image of 0 to 0.5 never meet black or white:
    # by so much can another class come closer, whatever an attack does
    gaps = model(images)[torch.arange(6), labels, None] - model(images)
    moves = 0.04 * (model.fc.weight[labels, None] - model.fc.weight).abs().sum(2)
    withstands = (gaps > moves).scatter(1, labels[:, None], True).all(1)
    assert 0 < int(withstands.sum()) < 6
    assert torch.equal(right, withstands)
    assert float((attacked - images).abs().max()) <= 0.04 + 1e-6
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
