"""A whole run: against a loop written by hand, and what its result holds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import normkit as nk
from lab.train.stand_ins import Batches, network, numbers, run, sets, until_epoch_ends
from normkit.errors import OptionError
from normkit.lab.data import load
from normkit.lab.experiment import Data, ModelStep, Run, Setting, Train, Watch
from normkit.lab.results import DIVERGED, DONE, Result
from normkit.lab.tasks import classification
from normkit.lab.train import Progress, Training, train


def test_a_run_is_what_a_plain_loop_gives() -> None:
    # revisiting BN's protocol in small, in float64, with nothing but torch
    given, asked = (
        sets(validation=7),
        run(
            epochs=4,
            lr=0.1,
            decay="weights",
            slower_scale=100,
            schedule="cosine",
            per="epoch",
            floor=1e-8,
            select="best_validation",
            label_smoothing=0.1,
            precision="float64",
        ),
    )
    training = Training(asked, given, model=network())
    while training.step():
        pass
    found = training.result()

    model = network().double()
    groups = nk.param_groups(model, 0.1, 1e-4, scale_lr_divisor=100)
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4, 1e-8)
    best = (-1.0, 0)
    for epoch in range(4):
        model.train()
        losses, right = 0.0, 0
        batches = given.train.batches(8, seed=asked.torch_seed(), epoch=epoch, shuffle=True)
        for x, y in batches:
            optimizer.zero_grad()
            logits = model(x.double())
            loss = F.cross_entropy(logits, y, label_smoothing=0.1)
            loss.backward()
            optimizer.step()
            losses, right = losses + loss.item() * len(y), right + (logits.argmax(1) == y).sum()
        rate = scheduler.get_last_lr()[0]
        scheduler.step()
        model.eval()
        with torch.no_grad():
            told = []
            for part in (given.validation, given.test):
                logits = model(part.images.double())
                told.append(F.cross_entropy(logits, part.labels).item())
                told.append((logits.argmax(1) == part.labels).double().mean().item())
        best = max(best, (told[1], -epoch - 1))
        record = found.epochs[epoch]
        assert record.lr == pytest.approx(rate, rel=1e-12)
        assert record.train_loss == pytest.approx(losses / 22, rel=1e-11)
        assert record.train_accuracy == right / 22
        assert [
            record.validation_loss,
            record.validation_accuracy,
            record.test_loss,
            record.test_accuracy,
        ] == pytest.approx(told, rel=1e-11)
    assert (found.status, found.selected) == (DONE, (-best[1],))
    for mine, theirs in zip(training.trainer.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-12)


def test_the_same_run_gives_the_same_numbers() -> None:
    def once() -> Result:
        training = Training(run(), sets(), model=network(dropout=0.3))
        while training.step():
            torch.rand(3)  # what others draw in between is theirs
        return numbers(training.result())

    assert once() == once()


def test_other_seeds_see_another_order() -> None:
    orders = []
    for seed in (1, 2, 1):
        given = sets()
        training = Training(run(seed), given, model=network())
        until_epoch_ends(training)
        orders.append(given.train.seen)
    assert orders[0] == orders[2]
    assert orders[0] != orders[1]
    assert sorted(i for batch in orders[0] for i in batch) == list(range(22))


def test_epochs_differ_in_order() -> None:
    given = sets()
    training = Training(run(epochs=2), given, model=network())
    while training.step():
        pass
    assert given.train.seen[:3] != given.train.seen[3:]


SMALL = Data("synthetic:1x8x8x3x60", flip=True)


def setting(*steps: ModelStep, data: Data = SMALL, **options: Any) -> Setting:
    return Setting(data=data, steps=steps, train=Train(epochs=2, batch=16, lr=0.05, **options))


def test_variants_are_paired_in_weights_and_data(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[float]] = []
    weights = []
    for variant in ((), (ModelStep("norm", "gn"),), (ModelStep("norm", "ubn"),)):
        training = Training(Run(setting(*variant), 3), load(SMALL))
        weights.append(training.trainer.model.get_parameter("conv1.conv.weight").clone())
        told: list[float] = []
        read = training.task.read

        def reading(*inputs: Any, read: Any = read, told: list[float] = told) -> Any:
            images, labels = read(*inputs)
            told.append(images.double().sum().item())
            return images, labels

        monkeypatch.setattr(training.task, "read", reading)
        while training.step():
            pass
        seen.append(told)
    assert len(seen[0]) == 2 * training.plan.batches
    assert seen[0] == seen[1] == seen[2]
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[0], weights[2])


def test_a_result_has_everything() -> None:
    told: list[Progress] = []
    asked = Run(setting(ModelStep("norm", "bn")), 1)
    result = train(asked, tell=told.append)
    assert result is not None
    assert (result.run, result.status, result.selected) == (asked.id, DONE, (2,))
    assert [epoch.epoch for epoch in result.epochs] == [1, 2]
    assert 0 < result.epochs[0].seconds < result.epochs[1].seconds == result.seconds
    assert result.images_per_second == pytest.approx(2 * 60 * 0.8 / result.seconds, rel=0.5)
    assert result.parameters == 24058 - 7 * (64 + 1)  # three classes instead of ten
    assert result.peak_memory is None
    assert result.environment["torch"] == str(torch.__version__)
    assert result.environment["recorded"].startswith("no: there are no CUDA graphs")
    assert Result.from_json(result.to_json()) == result
    assert [p.record for p in told if p.record] == list(result.epochs)
    assert told[-1].epochs == told[-1].of == 2
    assert {p.run for p in told} == {asked.id}
    assert told[-1].loss == result.epochs[-1].train_loss


def test_evaluation_is_as_rare_as_asked() -> None:
    training = Training(run(epochs=5, evaluate_every=2), sets(), model=network())
    while training.step():
        pass
    tested = [e.epoch for e in training.records if e.test_accuracy is not None]
    assert tested == [2, 4, 5]
    assert all(e.train_loss is not None for e in training.records)


def test_evaluation_in_parts_is_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    def tested() -> tuple[float | None, float | None]:
        training = Training(run(epochs=1, precision="float64"), sets(), model=network())
        until_epoch_ends(training)
        return training.records[0].test_loss, training.records[0].test_accuracy

    whole = tested()
    monkeypatch.setattr(classification, "LARGEST", 4)  # of 9
    assert tested() == pytest.approx(whole, rel=1e-12)


def test_the_size_of_evaluation_batches() -> None:
    sizes = [classification.batch_size((3, side, side)) for side in (8, 32, 224, 4096)]
    assert sizes == [1024, 1024, 83, 1]


def test_a_loss_that_is_no_number_is_infinite() -> None:
    score = classification.ClassificationScore(torch.device("cpu"), 3, part="validation")
    score.samples = 6
    score.sums.copy_(torch.tensor([math.nan, 3.0]))
    assert score.values() == {"loss": math.inf, "accuracy": 0.5}


@pytest.mark.parametrize("classes", [5, 6, 10])
def test_top_5_is_recorded_where_it_says_something(classes: int) -> None:
    data = Data(f"synthetic:1x8x8x{classes}x200", validation=0.2)
    asked = Run(Setting(data, train=Train(epochs=1, batch=50, lr=0.01)), seed=1)
    given = load(data)
    training = Training(asked, given)
    until_epoch_ends(training)
    model = training.trainer.model.eval()
    for part in ("validation", "test"):
        images, labels = next(iter(getattr(given, part).batches(200)))
        with torch.no_grad():
            order = model(images).argsort(1, descending=True)
        right = sum(int(y) in best for y, best in zip(labels, order[:, :5].tolist(), strict=True))
        found = training.records[-1].value("top5_accuracy", part)
        assert found == (right / len(labels) if classes > 5 else None)


def test_evaluation_does_not_teach() -> None:
    training = Training(run(epochs=1), sets(), model=network())
    while training.at < training.plan.steps:
        training.step()
    state = {k: v.clone() for k, v in training.trainer.model.state_dict().items()}
    while training.step():
        pass
    after = training.trainer.model.state_dict()
    assert training.records[0].test_loss is not None
    assert all(torch.equal(state[name], after[name]) for name in state)


def test_frozen_layers_stay_frozen() -> None:
    model = network()
    nk.freeze(model, "both", where="1")
    before = model[1].running_mean.clone()
    training = Training(run(), sets(), model=model)
    while training.step():
        pass
    assert torch.equal(training.trainer.model.get_submodule("1").running_mean, before)
    assert training.trainer.model.get_submodule("5").num_batches_tracked.item() == 9


# ------------------------------------------------------------------------------------ divergence


class Explodes(nn.Module):
    """Gives NaN in training from its n-th batch on."""

    def __init__(self, batches: int) -> None:
        super().__init__()
        self.inner, self.left = network(), batches

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.left -= self.training
        y: torch.Tensor = self.inner(x)
        return y * (math.nan if self.training and self.left < 0 else 1)


def test_a_divergence_is_a_result() -> None:
    # five steps are fine; three steps an epoch, so the sixth is the last of the second epoch
    training = Training(run(epochs=9), sets(), model=Explodes(5))
    while training.step():
        pass
    result = training.result()
    assert (result.status, result.selected, result.score("accuracy")) == (DIVERGED, (), None)
    assert [epoch.epoch for epoch in result.epochs] == [1]
    assert result.note == "The loss was not finite from step 6 on, in epoch 2 of 9."
    assert Result.from_json(result.to_json()) == result


def test_a_long_epoch_is_not_finished_once_lost() -> None:
    given = sets()
    given = type(given)(Batches(600, given.shape, given.classes, 0), None, given.test)
    training = Training(run(epochs=1, batch=4), given, model=Explodes(30))
    steps = 0
    while training.step():
        steps += 1
    assert steps < 60  # of 150
    assert "from step 31 on" in training.result().note


def test_a_real_divergence_by_a_rate_that_is_too_high() -> None:
    linear = nn.Sequential(nn.Flatten(), nn.Linear(50, 3))
    training = Training(run(lr=1e30, epochs=30, warmup=0), sets(), model=linear)
    while training.step():
        pass
    assert training.result().status == DIVERGED


def test_fp16_may_overflow_now_and_then() -> None:
    class Overflows(Explodes):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.left -= self.training
            y: torch.Tensor = self.inner(x)
            return y * (math.inf if self.training and self.left in (0, 1) else 1)

    training = Training(run(precision="fp16"), sets(), model=Overflows(4))
    while training.step():
        pass
    result = training.result()
    assert result.status == DONE
    assert all(math.isfinite(epoch.train_loss or math.nan) for epoch in result.epochs)


# ------------------------------------------------------------------------------------ bad input


def test_the_best_validation_needs_a_validation_set() -> None:
    with pytest.raises(OptionError, match="validation"):
        Training(run(select="best_validation"), sets(), model=network())


def test_a_measure_that_does_not_exist_is_refused() -> None:
    with pytest.raises(OptionError, match="condensation"):
        Training(run(watch=Watch(measures=("condensatoin",))), sets(), model=network())


def test_too_few_samples_are_refused() -> None:
    with pytest.raises(OptionError, match="22 samples"):
        Training(run(batch=23, drop_last=True), sets(), model=network())


def test_pictures_are_written_on_the_stream_that_has_drawn_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A picture drawn on the run's stream was read on the default one, which did not wait for it:
    on a GPU the first picture of a run's clips was noise."""
    training = Training(run(epochs=1), sets(), model=network())
    while training.step():
        pass
    inside: list[str] = []

    @contextmanager
    def on_stream() -> Iterator[None]:
        inside.append("stream")
        yield
        inside.append("left")

    def encoded(image: torch.Tensor) -> str:
        inside.append("encoded")
        return ""

    monkeypatch.setattr(training.run_device, "on_stream", on_stream)
    monkeypatch.setattr("normkit.lab.train.training.encoded", encoded)
    picture = ("a test image", torch.zeros(1, 2, 2))
    monkeypatch.setattr(training.task, "pictures", lambda model: [picture])
    assert len(training.result().pictures) == 1
    assert inside == ["stream", "encoded", "left"]
