"""Optimizers, schedules, averaged weights, early stops and rates of one's own choice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from normkit.errors import NormkitError, OptionError
from normkit.lab.experiment import Train
from normkit.lab.experiment.reading import parse
from normkit.lab.experiment.rules import section_faults
from normkit.lab.results import Result
from normkit.lab.train import Training
from normkit.lab.train.optimizer import groups_of, optimizer_of
from normkit.lab.train.schedule import rate

from .stand_ins import network, numbers, run, sets

CPU = torch.device("cpu")


def finished(training: Training) -> Result:
    while training.step():
        pass
    return training.result()


def trained(**train: Any) -> Training:
    training = Training(run(**train), sets(), model=network())
    finished(training)
    return training


def resumed(steps: int = 5, validation: int = 0, **train: Any) -> Result:
    given = sets(validation=validation)
    half = Training(run(**train), given, model=network())
    for _ in range(steps):
        half.step()
    rest = Training(run(**train), given, model=network())
    rest.load_state_dict(half.state_dict())
    return finished(rest)


def bare(optimizer: torch.optim.Optimizer, model: nn.Module, epochs: int) -> None:
    for epoch in range(epochs):
        seed = run().torch_seed()
        for images, labels in sets().train.batches(8, seed=seed, epoch=epoch, shuffle=True):
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()


OTHERS = [
    ("torch.optim:RMSprop", {"alpha": 0.9}),
    ("torch.optim:Adagrad", {}),
    ("lars", {"momentum": 0.8}),
    ("lamb", {}),
]


@pytest.mark.parametrize(("name", "options"), OTHERS, ids=[name for name, _ in OTHERS])
def test_any_optimizer_trains_as_in_a_bare_loop(name: str, options: dict[str, Any]) -> None:
    chosen: dict[str, Any] = {"optimizer": name, "optimizer_options": options, "lr": 0.02}
    chosen |= {"schedule": "constant", "epochs": 2}
    ours = trained(**chosen)
    model = network()
    if name in ("lars", "lamb"):
        library = pytest.importorskip("timm.optim")
        kind = getattr(library, name.title())
    else:
        kind = getattr(torch.optim, name.partition(":")[2])
    bare(kind(model.parameters(), lr=0.02, weight_decay=1e-4, **options), model.train(), 2)
    for mine, theirs in zip(ours.trainer.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
    assert numbers(resumed(**chosen)).epochs == numbers(ours.result()).epochs


def test_an_optimizer_that_cannot_be_used_is_told() -> None:
    for name, message in (
        ("torch.optim:RMSprp", "Did you mean 'RMSprop'"),
        ("torch.optim:LBFGS", "several times a step|could not be made"),
        ("torch.nn:Linear", "could not be made"),
    ):
        with pytest.raises(NormkitError, match=message):
            optimizer_of(network(), Train(optimizer=name), CPU)
    chosen = Train(optimizer="torch.optim:SGD", optimizer_options={"momentm": 1})
    with pytest.raises(OptionError, match="unexpected keyword"):
        optimizer_of(network(), chosen, CPU)
    faults = dict(section_faults("train", Train(optimizer_options={"momentum": 0.1})))
    assert "torch.optim:SGD" in faults["train.optimizer_options"]


def test_any_scheduler_of_torch() -> None:
    torch_ = "torch.optim.lr_scheduler:"
    options = {"gamma": 0.5}
    by_epoch = Train(
        epochs=4, schedule=f"{torch_}ExponentialLR", schedule_options=options, per="epoch"
    )
    assert [rate(by_epoch, 0.4, step, 10) for step in (0, 9, 10, 39)] == [0.4, 0.4, 0.2, 0.05]
    cosine = Train(epochs=2, schedule=f"{torch_}CosineAnnealingLR")
    ours = Train(epochs=2, schedule="cosine")
    for step in range(20):
        assert rate(cosine, 0.1, step, 10) == pytest.approx(rate(ours, 0.1, step, 10))
    warm = Train(epochs=2, schedule=f"{torch_}ConstantLR", schedule_options={"factor": 1.0})
    warm = Train(**{**vars(warm), "warmup": 1})
    assert rate(warm, 0.1, 5, 10) == pytest.approx(0.05)


def test_one_cycle() -> None:
    train = Train(epochs=2, schedule="one_cycle", schedule_options={"pct_start": 0.25})
    rates = [rate(train, 0.1, step, 50) for step in range(100)]
    assert max(rates) == pytest.approx(0.1)
    assert rates.index(max(rates)) == 24
    assert rates[0] == pytest.approx(0.1 / 25)
    assert rates[-1] < 1e-5


def test_a_schedule_that_cannot_be_used_is_told() -> None:
    plateau = Train(schedule="torch.optim.lr_scheduler:ReduceLROnPlateau")
    with pytest.raises(OptionError, match="follows a metric"):
        rate(plateau, 0.1, 0, 10)
    with pytest.raises(OptionError, match="missing 1 required"):
        rate(Train(schedule="torch.optim.lr_scheduler:ExponentialLR"), 0.1, 0, 10)


def test_averaged_weights_follow_the_formula_and_are_evaluated() -> None:
    chosen: dict[str, Any] = {"ema": 0.75, "epochs": 2}
    training = Training(run(**chosen), sets(), model=network())
    average = training.trainer.average
    assert average is not None
    expected = {n: p.detach().clone() for n, p in training.trainer.model.named_parameters()}
    steps = 0
    while training.epoch < 1:
        before = training.at
        training.step()
        if training.at != before and training.at:
            steps += 1
            decay = min(0.75, steps / (steps + 9))
            for name, value in training.trainer.model.named_parameters():
                expected[name] = decay * expected[name] + (1 - decay) * value.detach()
    for name, value in average.model.named_parameters():
        torch.testing.assert_close(value, expected[name])
    images, labels = next(iter(training.sets.test.batches(9)))
    with torch.no_grad():
        loss = F.cross_entropy(average.model(images), labels).item()
    assert training.records[0].test_loss == pytest.approx(loss, rel=1e-5)
    assert numbers(resumed(**chosen)).epochs == numbers(finished(training)).epochs


def test_a_run_stops_when_validation_gets_no_better() -> None:
    chosen: dict[str, Any] = {"epochs": 30, "stop_after": 2, "schedule": "constant", "lr": 1e-9}
    given = sets(validation=12)
    training = Training(run(**chosen), given, model=network())
    result = finished(training)
    scores = [epoch.validation_accuracy for epoch in result.epochs]
    best = scores.index(max(scores, key=lambda score: score or 0.0))
    assert len(scores) == best + 1 + 2 < 30
    assert result.selected == (len(scores),)
    assert f"Stopped after epoch {len(scores)} of 30" in result.note
    assert result.outcome("loss") in ("done", "collapsed")
    again = resumed(5, 12, **chosen)
    assert numbers(again).epochs == numbers(result).epochs
    with pytest.raises(OptionError, match="validation"):
        Training(run(stop_after=2), sets(), model=network())


def test_rates_by_layer() -> None:
    model = network()
    train = Train(lr=0.1, layer_decay=0.5, rates={"8.*": 0.0, "*.bias": 2.0})
    lrs = {id(p): group["lr"] for group in groups_of(model, train) for p in group["params"]}
    names = {name: lrs[id(p)] for name, p in model.named_parameters()}
    assert names == pytest.approx(
        {
            "0.weight": 0.1 * 0.5**4,
            "1.weight": 0.1 * 0.5**3,
            "1.bias": 0.2 * 0.5**3,
            "4.weight": 0.1 * 0.5**2,
            "5.weight": 0.05,
            "5.bias": 0.1,
            "8.weight": 0.0,
            "8.bias": 0.0,
        }
    )
    with pytest.raises(OptionError, match=r"train\.rates has 'layer1\.\*'.*'0\.weight'"):
        groups_of(model, Train(rates={"layer1.*": 0.1}))


def test_the_file_may_say_all_of_it(tmp_path: Path) -> None:
    experiment = parse(
        """
        baseline = "a"
        [data]
        validation = 0.1
        [train]
        optimizer = "lamb"
        optimizer_options = { betas = [0.9, 0.99] }
        schedule = "one_cycle"
        rates = { "conv1.*" = 0.1 }
        ema = 0.999
        stop_after = 3
        [[variants]]
        name = "a"
        [[variants]]
        name = "b"
        norm = "gn"
        """
    )
    train = experiment.variants[0].setting.train
    assert (train.ema, train.stop_after, train.rates) == (0.999, 3, {"conv1.*": 0.1})
