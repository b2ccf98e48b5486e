"""What a finding advises does what it says when it is pasted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import normkit as nk
from normkit.diagnosis.diagnose import diagnose


def scaled_inputs(offset: float) -> tuple[nn.Sequential, list[Tensor], list[Tensor]]:
    """A model, data as in training, and the same data as pixels on another scale."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.ReLU())
    right = [torch.randn(32, 3, 6, 6) for _ in range(6)]
    for x in right * 20:
        model(x)
    with torch.no_grad():
        model[1].weight.mul_(torch.linspace(0.9, 1.3, 8))
    return model.eval(), right, [64 * x + offset for x in right]


@pytest.mark.parametrize("form", ["tensors", "pairs", "mappings"])
@pytest.mark.parametrize("offset", [0.0, 120.0])
def test_the_remedy_for_wrong_scaling_works_without_training_data(offset: float, form: str) -> None:
    """With an offset too, as of pixels that were not standardized, a factor is not enough."""
    model, right, wrong = scaled_inputs(offset)
    loader: Any = wrong
    if form == "pairs":
        loader = [(x, torch.zeros(len(x), 8, 6, 6)) for x in wrong]
    elif form == "mappings":
        loader = [{"input": x} for x in wrong]
    (first, *_) = diagnose(model, loader).findings
    assert first.kind == "wrong-input-scaling"
    scope: dict[str, Any] = {"model": model, "loader": loader, "nk": nk}
    expected = torch.cat([model(x) for x in right])
    exec(first.remedy, scope)
    inputs = [batch[0] if form == "pairs" else batch for batch in scope["loader"]]
    inputs = [x["input"] if form == "mappings" else x for x in inputs]
    found = torch.cat([model(x) for x in inputs])
    # the statistics of the data themselves against a running average: the sampling error of both
    assert (found - expected).square().mean() < 0.01 * expected.square().mean()


def test_a_negative_offset_is_subtracted() -> None:
    model, right, wrong = scaled_inputs(120.0)
    data = [(x, 0) for x in wrong]
    (first, *_) = diagnose(model, data, train_loader=[(x, 0) for x in right]).findings
    assert first.kind == "wrong-input-scaling"
    assert "+ -" not in first.remedy
    assert " - 1.8" in first.remedy


def test_a_gap_on_shifted_data_asks_for_adaptation() -> None:
    """Statistics that fit the training data are not made better by calibration on these."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8)
    )
    data = [torch.randn(64, 4) for _ in range(8)]
    for x in data * 20:
        model(x)
    with torch.no_grad():
        model[1].weight.mul_(torch.linspace(0.9, 1.3, 8))
    other = [1.25 * x + 0.2 for x in data]

    def loss(output: Tensor, _: Any) -> Tensor:
        return output.mean(0).square().mean() + 1

    (found,) = diagnose(model.eval(), other, loss=loss, train_loader=data).findings
    assert (found.kind, found.remedy) == ("train-eval-gap", "nk.adapt(model, loader, prior=0)")
    (found,) = diagnose(model, other, loss=loss).findings
    assert found.remedy == "nk.calibrate(model, loader)"


def test_of_norms_that_are_equally_unripe_the_worst_is_named() -> None:
    model = nn.Sequential(*(nn.BatchNorm1d(4) for _ in range(3)))
    for _ in range(5):
        model(torch.randn(64, 4))
    model[1].running_mean += 5
    (found, *_) = diagnose(model.eval(), [torch.randn(64, 4) for _ in range(4)]).findings
    assert (found.kind, found.path) == ("unripe-statistics", "1")


@pytest.mark.parametrize("form", ["loader", "list"])
def test_batches_in_order_are_mixed_by_the_remedy(form: str) -> None:
    """The line asked for the data set of the loader, which a list of batches does not have."""
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
    x, y = torch.randn(512, 4).sort(0).values, torch.zeros(512)
    loader: Any = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 32)
    if form == "list":
        loader = list(loader)
    for part, _ in list(loader) * 9:
        model(part)
    found = diagnose(model, loader, loss=lambda *_: 0.0, train_loader=loader)
    (wrong,) = [f for f in found.findings if f.kind == "unshuffled-batches"]
    scope: dict[str, Any] = {"train_loader": loader, "torch": torch}
    exec(wrong.remedy, scope)
    again = diagnose(model, loader, loss=lambda *_: 0.0, train_loader=scope["train_loader"])
    assert "unshuffled-batches" not in {f.kind for f in again.findings}
    assert sum(len(part) for part, _ in scope["train_loader"]) == 512
