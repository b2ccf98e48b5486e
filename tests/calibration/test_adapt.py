"""adapt: new data, old statistics, and the guard against collapse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import subjects
from normkit.calibration import adapt
from normkit.calibration.adapt import EffectiveClasses, lost_classes
from normkit.errors import NothingToDo, OptionError


def test_without_a_prior_it_is_adabn() -> None:
    layer, x = nn.BatchNorm2d(3), 4 + 2 * torch.randn(30, 3, 4, 4)
    adapt(layer, list(x.split(7)), prior=0)
    values = x.double().movedim(1, 0).flatten(1)
    torch.testing.assert_close(layer.running_mean.double(), values.mean(1), rtol=1e-6, atol=0)
    torch.testing.assert_close(layer.running_var.double(), values.var(1), rtol=1e-6, atol=0)


@pytest.mark.parametrize("prior", [16.0, 100.0])
def test_the_prior_counts_as_so_many_images(prior: float) -> None:
    """As if images with the old mean and variance had been in the data."""
    layer, x = nn.BatchNorm2d(1), 4 + 2 * torch.randn(30, 1, 4, 4)
    with torch.no_grad():
        layer.running_mean.fill_(-1)
        layer.running_var.fill_(9)
    adapt(layer, list(x.split(7)), prior=prior)
    share = 30 / (30 + prior)
    mean, var = x.double().mean().item(), x.double().var(correction=0).item()
    assert layer.running_mean.item() == pytest.approx(share * mean + (1 - share) * -1, rel=1e-6)
    # of a mixture: also how far the two means are apart
    mixed = share * var + (1 - share) * 9 + share * (1 - share) * (mean + 1) ** 2
    total = (30 + prior) * 16
    assert layer.running_var.item() == pytest.approx(mixed * total / (total - 1), rel=1e-6)


def test_a_large_prior_changes_nearly_nothing() -> None:
    layer = nn.BatchNorm2d(1)
    adapt(layer, 4 + torch.randn(30, 1, 4, 4), prior=1e9)
    assert layer.running_mean.item() == pytest.approx(0, abs=1e-6)
    assert layer.running_var.item() == pytest.approx(1, abs=1e-6)


class Classifier(nn.Module):
    """Three kinds of stripes, told apart by contrast-sensitive features."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(),
            nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(),
        )  # fmt: skip
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean((2, 3)))


def stripes(n: int) -> tuple[Tensor, Tensor]:
    kind = torch.arange(n) % 3
    line = torch.tensor([1.0, -1.0]).repeat(4)
    x = torch.randn(n, 1, 8, 8) * 0.3
    x[kind == 1] += line[:, None]
    x[kind == 2] += line
    return x, kind


@pytest.fixture(scope="module")
def trained() -> Classifier:
    return _trained(Classifier(), stripes)


def _trained(model: Classifier, data: Callable[[int], tuple[Tensor, Tensor]]) -> Classifier:
    torch.manual_seed(0)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()  # type: ignore[operator]
    model.train()
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    for _ in range(60):
        x, y = data(60)
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    return (subjects.output(model, x).argmax(1) == y).float().mean().item()


def test_it_repairs_shifted_data(trained: Classifier) -> None:
    x, y = stripes(150)
    shifted = 0.15 * x + 3  # low contrast, too bright
    assert accuracy(trained, x, y) > 0.95
    assert accuracy(trained, shifted, y) < 0.7
    done = adapt(trained, list(shifted.split(32)), prior=0)
    assert done.kept
    assert accuracy(trained, shifted, y) > 0.95
    assert "adapted" in str(done)
    done.undo()
    assert accuracy(trained, x, y) > 0.95


def test_blank_images_are_refused(trained: Classifier) -> None:
    before = subjects.portrait(trained)
    done = adapt(trained, torch.full((40, 1, 8, 8), 0.5), prior=0)
    assert not done.kept
    assert "hardly vary at body.1" in done.why_not
    assert subjects.portrait(trained) == before
    adapt(trained, torch.full((40, 1, 8, 8), 0.5), prior=0, guard=False).undo()
    assert subjects.portrait(trained) == before


class Padded(Classifier):
    """Tells where a spot is. With padding: at the borders a blank image varies."""

    def __init__(self) -> None:
        super().__init__()
        for conv in (self.body[0], self.body[3]):
            conv.padding = (1, 1)  # type: ignore[assignment]
        self.head = nn.Linear(8 * 64, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).flatten(1))


def spots(n: int) -> tuple[Tensor, Tensor]:
    kind = torch.arange(n) % 3
    x = torch.randn(n, 1, 8, 8) * 0.3
    for place in range(3):
        x[kind == place, :, 2:5, 2 * place : 2 * place + 3] += 2
    return x, kind


@pytest.fixture(scope="module")
def padded() -> Classifier:
    return _trained(Padded(), spots)


def degenerate(name: str) -> Tensor:
    torch.manual_seed(0)
    x, y = spots(96)
    return {
        "blank": torch.zeros(64, 1, 8, 8),
        "constant": torch.full((64, 1, 8, 8), 0.7),
        "nearly blank": 1e-3 * torch.randn(64, 1, 8, 8),
        "saturated": (100 * x + 300).clamp(max=1.0),
        "repeated": x[:1].repeat(64, 1, 1, 1),
        "one class": x[y == 1],
        "constant, differing": torch.rand(64, 1, 1, 1).expand(64, 1, 8, 8).clone(),
        "blank but six": torch.cat([torch.zeros(58, 1, 8, 8), x[:6]])[torch.randperm(64)],
    }[name]


@pytest.mark.parametrize("prior", [0.0, 16.0])
@pytest.mark.parametrize(
    "name", ["blank", "constant", "nearly blank", "saturated", "repeated", "one class"]
)
def test_data_that_tell_nothing_are_refused(padded: Classifier, name: str, prior: float) -> None:
    """nk.adapt(net, [torch.zeros(64, 3, 32, 32)]) was kept, and accuracy fell from 0.63 to 0.08:
    the guard looked at the mixture with the prior, which varies however blank the data are, and
    padding makes constant images vary at their borders."""
    x, y = spots(150)
    assert accuracy(padded, x, y) > 0.95
    before = subjects.portrait(padded)
    done = adapt(padded, list(degenerate(name).split(16)), prior=prior)
    assert not done.kept
    assert done.why_not
    assert subjects.portrait(padded) == before


@pytest.mark.parametrize("name", ["constant, differing", "blank but six"])
def test_images_without_contrast_are_refused(padded: Classifier, name: str) -> None:
    """Constant images of differing brightness vary as a whole, and were kept; so were blank ones
    with a few others among them. Accuracy on digits fell from 0.93 to 0.77."""
    before = subjects.portrait(padded)
    done = adapt(padded, list(degenerate(name).split(16)))
    assert not done.kept
    assert "of 64 images have no contrast of their own" in done.why_not
    assert subjects.portrait(padded) == before


@pytest.mark.parametrize(
    "change",
    ["as it is", "low contrast", "bright", "few", "same batch again", "each its own light"],
)
def test_the_guard_lets_other_data_pass(padded: Classifier, change: str) -> None:
    torch.manual_seed(0)
    x, _ = spots(60)
    data = {
        "as it is": [x],
        "low contrast": [0.15 * x],
        "bright": [x + 3],
        "few": [x[:6]],
        "same batch again": [x, x, x],
        "each its own light": [x * (0.3 + torch.rand(60, 1, 1, 1)) + torch.rand(60, 1, 1, 1)],
    }[change]
    done = adapt(padded, data)
    assert done.kept, done.why_not
    done.undo()


def test_predictions_that_concentrate_are_refused() -> None:
    """Two broken samples among three hundred: far off, so that they rule mean and variance, and
    with their statistics all others are one class."""
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3, bias=False))
    with torch.no_grad():
        model[1].weight.copy_(80 * torch.eye(3))
    x = torch.cat([torch.eye(3).repeat(100, 1), 1000 * torch.tensor([[-1.0, 1.0, 1.0]] * 2)])
    before = subjects.portrait(model)
    done = adapt(model, list(x.split(50)), prior=0)
    assert not done.kept
    assert "predictions have collapsed: 3.0 classes in effect before, 1." in done.why_not
    assert "collapsed" in str(done)
    assert subjects.portrait(model) == before
    adapt(model, list(x.split(50)), prior=0, guard=False)
    assert (subjects.output(model, x[:300]).argmax(1) == 0).all()  # the guard was right


def test_the_collapse_of_predictions_is_measured_by_the_classes_in_effect() -> None:
    def classes(effective: float) -> EffectiveClasses:
        return EffectiveClasses(effective, 10, 64)

    assert lost_classes(classes(10.0), classes(5.1)) is None
    assert "10.0 classes" in (lost_classes(classes(10.0), classes(4.9)) or "")
    assert lost_classes(None, classes(4.9)) is None
    assert "not finite" in (lost_classes(classes(3.0), classes(float("nan"))) or "")


def test_a_metric_decides_where_the_guard_cannot(trained: Classifier) -> None:
    """All data of one class: adaptation takes away what tells the class, and nothing collapses."""
    x, y = stripes(150)
    one = x[y == 1]
    before = subjects.portrait(trained)
    done = adapt(trained, one, prior=0, guard=False, metric=lambda model: accuracy(model, x, y))
    assert done.metric is not None
    assert done.metric[1] < done.metric[0]
    assert not done.kept
    assert subjects.portrait(trained) == before


@pytest.mark.parametrize("prior", [-1.0, float("nan"), float("inf")])
def test_a_prior_is_a_number_of_images(prior: float) -> None:
    with pytest.raises(OptionError, match="prior"):
        adapt(nn.BatchNorm1d(2), torch.randn(8, 2), prior=prior)


@pytest.mark.parametrize("batches", [[], iter(())])
def test_no_batches(batches: Any) -> None:
    layer = nn.BatchNorm1d(2)
    with pytest.raises(NothingToDo):
        adapt(layer, batches)
    assert layer.running_mean.abs().max() == 0
