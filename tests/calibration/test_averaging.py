"""Statistics of averaged weights: three policies, and which of them fits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, update_bn

import normkit as nk
from normkit.errors import OptionError


def trained(use_buffers: bool) -> tuple[nn.Module, AveragedModel, list[Tensor]]:
    """Weights that move far between updates, so that the average is none of them."""
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(3, 6), nk.BN(6), nn.ReLU(), nn.Linear(6, 4), nn.BatchNorm1d(4))
    averaged = AveragedModel(model, use_buffers=use_buffers)
    batches = [torch.randn(32, 3) + 1 for _ in range(3)]
    for _ in range(5):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p))
        for x in batches:
            model(x)
        averaged.update_parameters(model)
    return model, averaged, batches


def test_reestimated_statistics_are_those_of_the_averaged_weights() -> None:
    """torch's own update_bn knows torch's norms alone: ours went on from the old statistics, in
    silence."""
    _, averaged, batches = trained(use_buffers=False)
    with torch.no_grad():
        inputs = averaged.module[0](torch.cat(batches))
    update_bn(batches, averaged)
    assert not torch.allclose(averaged.module[1].running_mean, inputs.mean(0), rtol=0.01)
    nk.averaged_statistics(averaged, batches)
    torch.testing.assert_close(averaged.module[1].running_mean, inputs.mean(0))
    torch.testing.assert_close(averaged.module[1].running_var, inputs.var(0))


def test_copied_and_averaged_statistics() -> None:
    model, averaged, _ = trained(use_buffers=True)
    assert not torch.equal(averaged.module[1].running_mean, model[1].running_mean)
    held = averaged.module[1].running_mean.clone()
    nk.averaged_statistics(averaged, policy="average")
    assert torch.equal(averaged.module[1].running_mean, held)
    nk.averaged_statistics(averaged, policy="copy", model=model)
    for mine, its in zip(averaged.module.buffers(), model.buffers(), strict=True):
        assert torch.equal(mine, its)


def test_policies_are_compared_and_nothing_changes() -> None:
    model, averaged, batches = trained(use_buffers=True)
    held = [b.clone() for b in averaged.buffers()]

    def metric(network: nn.Module) -> float:
        assert not network.training
        return float(network(batches[0]).square().mean())

    result = nk.compare_averaging(averaged, model, iter(batches), metric, higher_is_better=False)
    assert set(result.shift) == set(result.metric) == {"average", "copy", "reestimate"}
    assert result.shift["reestimate"] < 1e-6 < min(result.shift["copy"], result.shift["average"])
    assert result.best == min(result.metric, key=lambda policy: result.metric[policy])
    for was, now in zip(held, averaged.buffers(), strict=True):
        assert torch.equal(was, now)
    lines = str(result).splitlines()
    assert lines[0].split() == ["policy", "metric", "statistics", "off", "by"]
    assert [line.split()[0] for line in lines[1:]] == ["average", "copy", "reestimate"]
    assert sum("best" in line for line in lines) == 1


def test_what_cannot_be_is_told() -> None:
    model, averaged, batches = trained(use_buffers=False)
    result = nk.compare_averaging(averaged, model, batches)
    assert "use_buffers=True" in result.refused["average"]
    assert result.best == "reestimate"
    with pytest.raises(OptionError, match="has not averaged its statistics"):
        nk.averaged_statistics(averaged, policy="average")
    with pytest.raises(OptionError, match="try model="):
        nk.averaged_statistics(averaged, policy="copy")
    with pytest.raises(OptionError, match="try batches="):
        nk.averaged_statistics(averaged)
    with pytest.raises(OptionError, match="Did you mean 'copy'"):
        nk.averaged_statistics(averaged, policy="copied")
    other = nn.Sequential(nn.Linear(3, 6), nk.BN(5))
    with pytest.raises(OptionError, match="1 keeps other statistics"):
        nk.averaged_statistics(averaged, policy="copy", model=other)
