"""Running statistics that are wrong for a while."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torchvision
from torch import nn

import normkit as nk
from normkit.diagnosis import disturbance_test, disturbed
from normkit.diagnosis.disturbance import first_of_blocks
from normkit.errors import NothingToDo, OptionError


def model_with_statistics(norm: Any = nn.BatchNorm1d) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 6), norm(6), nn.ReLU(), nn.Linear(6, 3), norm(3))
    for module in model.modules():
        if hasattr(module, "running_mean"):
            module.running_mean.uniform_(1, 2)
            module.running_var.uniform_(1, 2)
    return model


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nk.BN])
def test_statistics_are_scaled_within_delta_and_restored(norm: Any) -> None:
    model = model_with_statistics(norm)
    before = copy.deepcopy(model.state_dict())
    with disturbed(model, 0.3) as paths:
        for path in paths:
            for name in ("running_mean", "running_var"):
                factor = model.state_dict()[f"{path}.{name}"] / before[f"{path}.{name}"]
                assert ((factor > 0.7) & (factor < 1.3)).all()
                assert factor.std() > 0.01
    assert paths == ("1", "4")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_one_factor_a_layer() -> None:
    model = model_with_statistics()
    before = copy.deepcopy(model.state_dict())
    with disturbed(model, 0.3, per="layer"):
        factor = model.state_dict()["1.running_mean"] / before["1.running_mean"]
    assert factor.std() < 1e-6
    assert abs(float(factor[0]) - 1) > 1e-3


def test_they_are_uniform() -> None:
    model = nn.Sequential(nn.BatchNorm1d(20_000))
    model[0].running_mean.fill_(1.0)
    with disturbed(model, 0.5, seed=3):
        factor = model[0].running_mean.double() - 1
        var = model[0].running_var.double() - 1
    deviation = (1 / 12) ** 0.5  # of a uniform distribution of width 1
    assert abs(float(factor.mean())) < 5 * deviation / 20_000**0.5
    assert float(factor.std()) == pytest.approx(deviation, rel=0.02)
    assert float(torch.corrcoef(torch.stack([factor, var]))[0, 1].abs()) < 5 / 20_000**0.5


def test_a_seed_repeats_and_variances_stay_above_zero() -> None:
    model = model_with_statistics()
    drawn = []
    for seed in (0, 0, 1):
        with disturbed(model, 3.0, seed=seed):
            drawn.append(model[1].running_var.clone())
            assert (model[1].running_var >= 0).all()
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_an_error_inside_restores_too_and_so_does_training() -> None:
    model = model_with_statistics().train()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(KeyError), disturbed(model, 0.5):
        {}[float(model(torch.randn(8, 4)).sum().detach())]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_layers_of_the_paper() -> None:
    model = torchvision.models.resnet50(num_classes=2)
    with disturbed(model, 0.1, where=first_of_blocks(6)) as paths:
        pass
    blocks = ["layer1.0", "layer1.1", "layer1.2", "layer2.0", "layer2.1", "layer2.2"]
    assert list(paths) == [f"{block}.bn1" for block in blocks]


def test_batch_free_norms_do_not_mind_and_batch_norms_do() -> None:
    """A group norm after the disturbed layer takes a common factor out again."""
    x, y = torch.randn(64, 4), torch.randint(0, 3, (64,))

    def spread(norm: nn.Module) -> float:
        torch.manual_seed(1)
        model = nn.Sequential(nn.BatchNorm1d(4, affine=False), norm, nn.Linear(4, 3))
        found = disturbance_test(model, [(x, y)], deltas=[0.9], seeds=3, where="0", per="layer")
        assert found.layers == ("0",)
        return max(abs(loss - found.undisturbed) for loss in found.losses[0.9])

    # means are 0, so that the variances alone are disturbed: one factor for all channels
    assert spread(nn.LayerNorm(4, eps=0.0)) < 1e-4
    assert spread(nn.Identity()) > 1e-2


def test_a_test_averages_seeds_and_prints() -> None:
    model = model_with_statistics().eval()
    before = copy.deepcopy(model.state_dict())
    x, y = torch.randn(32, 4), torch.randint(0, 3, (32,))
    found = disturbance_test(model, [(x, y)], deltas=[0.0, 0.5], seeds=2)
    assert found.means[0.0] == pytest.approx(found.undisturbed)
    assert len(found.losses[0.5]) == 2
    assert found.losses[0.5][0] != found.losses[0.5][1]
    assert found.means[0.5] == pytest.approx(sum(found.losses[0.5]) / 2)
    assert "0.5" in str(found)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_bad_input() -> None:
    model, data = model_with_statistics(), [(torch.randn(8, 4), torch.zeros(8, dtype=torch.long))]
    with pytest.raises(OptionError, match="delta"), disturbed(model, -1.0):
        pass
    with pytest.raises(OptionError, match="per"), disturbed(model, 0.1, per="model"):
        pass
    with pytest.raises(NothingToDo, match="no norms"), disturbed(nn.Linear(2, 2), 0.1):
        pass
    group = nn.Sequential(nn.GroupNorm(1, 4))
    with pytest.raises(NothingToDo, match="running statistics"), disturbed(group, 0.1):
        pass
    with pytest.raises(OptionError, match="seeds"):
        disturbance_test(model, data, seeds=0)
    with pytest.raises(NothingToDo, match="no batches"):
        disturbance_test(model, [])
