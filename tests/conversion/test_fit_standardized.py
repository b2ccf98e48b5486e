"""Weight standardization on top of a fitted conversion."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import normkit as nk
from normkit.errors import NothingToDo, UnknownName
from normkit.layers.weight import normalized_tensors


def images(count: int = 40) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, 3, 10, 10, generator=generator)


def network() -> nn.Module:
    """Two batch norms whose running statistics are those of the images."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16, momentum=None), nn.ReLU(),
        nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16, momentum=None), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5),
    )  # fmt: skip
    with torch.no_grad():
        model(images())
    return model.eval()


@torch.no_grad()
def error(model: nn.Module, reference: nn.Module) -> float:
    """Of the outputs for the images that a fit holds out: every fifth."""
    x = images()[4::5]
    old = reference(x)
    return float((model(x) - old).norm() / old.norm())


def reported(plan: Any) -> float:
    value: float = plan.fit.output_error
    return value


@pytest.mark.parametrize(
    ("target", "options"), [("gn", {"groups": 1}), ("bcn", {"groups": 4}), ("bgn", {"groups": 4})]
)
def test_the_norms_are_fitted_to_the_old_network(target: str, options: dict[str, Any]) -> None:
    """With what the weights have become: the network that is applied is the one that was fitted,
    and nearer to the old one than a fit whose weights are standardized afterwards."""
    old, model, afterwards = network(), network(), network()
    before = copy.deepcopy(model.state_dict())
    fit = nk.Fit(images(), standardize="ws")
    plan = nk.plan_conversion(model, target, fit=fit, **options)
    assert model.state_dict().keys() == before.keys()  # nothing is changed yet
    plan.apply()
    assert all(normalized_tensors(model[i]) for i in (0, 3))
    assert torch.allclose(model[0].weight.mean((1, 2, 3)), torch.zeros(16), atol=1e-6)
    assert error(model, old) == pytest.approx(reported(plan), rel=1e-3)
    nk.convert(afterwards, target, fit=images(), **options)
    nk.standardize(afterwards)
    assert error(model, old) < error(afterwards, old)
    assert not any(step.exact for step in plan.steps)
    plan.undo()
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_what_keeps_the_function_costs_nothing() -> None:
    """wn is another way to write the same weight."""
    plain, model = network(), network()
    nk.convert(plain, "gn", groups=1, fit=images())
    nk.convert(model, "gn", groups=1, fit=nk.Fit(images(), standardize="wn"))
    assert torch.allclose(plain(images()), model(images()), atol=1e-4)


@pytest.mark.parametrize("parameters", ["norms", "all"])
def test_distilling_goes_on_with_standardized_weights(parameters: Any) -> None:
    old, model = network(), network()
    fit = nk.Fit(images(), standardize="ws", distill=8, parameters=parameters)
    plan = nk.plan_conversion(model, "gn", groups=1, fit=fit)
    first = nk.plan_conversion(network(), "gn", groups=1, fit=nk.Fit(images(), standardize="ws"))
    plan.apply()
    assert reported(plan) <= reported(first) * (1 + 1e-6)
    assert error(model, old) == pytest.approx(reported(plan), rel=1e-3)


def test_a_network_that_is_standardized_already_is_fitted_as_it_is() -> None:
    model = network()
    nk.standardize(model)
    for norm in (model[1], model[4]):
        norm.reset_running_stats()
    with torch.no_grad():
        model.train()(images())
    old = copy.deepcopy(model.eval())
    plain = nk.convert(copy.deepcopy(model), "gn", groups=1, example=False)
    plan = nk.plan_conversion(model, "gn", groups=1, fit=images())
    plan.apply()
    assert normalized_tensors(model[0])
    assert error(model, old) == pytest.approx(reported(plan), rel=1e-3)
    assert error(model, old) < error(plain, old)
    with pytest.raises(NothingToDo, match="standardized already"):
        nk.plan_conversion(model, "ln", fit=nk.Fit(images(), standardize="ws"))


def test_what_cannot_be_is_refused() -> None:
    model = network()
    with pytest.raises(UnknownName, match="no method 'wss'"):
        nk.plan_conversion(model, "gn", groups=1, fit=nk.Fit(images(), standardize="wss"))
    only_norm = nn.Sequential(nn.BatchNorm2d(3), nn.ReLU()).eval()
    with pytest.raises(NothingToDo, match="no convolution to standardize"):
        nk.plan_conversion(only_norm, "gn", groups=1, fit=nk.Fit(images(), standardize="ws"))
    assert not normalized_tensors(model[0])


def test_a_trained_network_that_was_just_standardized_is_warned_of() -> None:
    """It was told that its images are unlike those of the training, which they are not."""
    model = network()
    nk.standardize(model)
    with pytest.warns(UserWarning, match="what standardizing made of it.*standardize=.ws"):
        nk.convert(model, "gn", groups=1, fit=images())
