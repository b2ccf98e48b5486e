"""Micro-batch bcn: the rate follows the learning rate, whatever schedules it."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR

import normkit as nk
from normkit.errors import NothingToDo, OptionError


def network(**options):
    return nn.Sequential(nn.Conv2d(3, 8, 3), nk.BCN(8, groups=2, micro=True, **options))


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.randn(1, 3, 6, 6)).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("schedule", [StepLR, CosineAnnealingLR])
def test_rate_is_the_learning_rate_of_the_same_step(schedule):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    scheduler = schedule(optimizer, 2)
    nk.follow_learning_rate(model, optimizer)
    for _ in range(5):
        now = optimizer.param_groups[0]["lr"]
        step(model, optimizer)
        assert model[1].rate.item() == pytest.approx(now, rel=1e-6)
        scheduler.step()


def test_rate_is_clipped_to_one():
    model = network()
    nk.follow_learning_rate(model, torch.optim.SGD(model.parameters(), lr=7.0))
    assert model[1].rate.item() == 1.0


def test_second_parameter_group():
    model = network()
    groups = [{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 0.01}]
    nk.follow_learning_rate(model, torch.optim.SGD(groups, lr=0.5), group=1)
    assert model[1].rate.item() == pytest.approx(0.01)
    with pytest.raises(OptionError, match=r"2 parameter group\(s\), got group=2"):
        nk.follow_learning_rate(model, torch.optim.SGD(groups, lr=0.5), group=2)


def test_eval_mode_and_removal():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    handle = nk.follow_learning_rate(model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.2
    model.eval()(torch.randn(1, 3, 6, 6))
    assert model[1].rate.item() == pytest.approx(0.3)
    handle.remove()
    model.train()(torch.randn(1, 3, 6, 6))
    assert model[1].rate.item() == pytest.approx(0.3)
    assert not model._forward_pre_hooks


def test_copies_do_not_write_into_the_original():
    """An averaged copy of the model (EMA) carries the hook along."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    nk.follow_learning_rate(model, optimizer)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        before = model[1].running_mean.clone()
        twin(torch.randn(1, 3, 6, 6))
        assert torch.equal(model[1].running_mean, before)


def test_checkpoint_keeps_the_rate():
    model, other = network(update_rate=0.25), network()
    other.load_state_dict(model.state_dict())
    other(torch.randn(1, 3, 6, 6))
    assert other[1].rate.item() == 0.25


def test_once_a_step():
    """Two micro-batches, one update with their average, after the optimizer has stepped."""
    model = network(update_every="step")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    nk.follow_learning_rate(model, optimizer)
    layer = model[1]
    x = torch.randn(2, 8, 4, 4, dtype=torch.float32)
    layer(x[:1]), layer(x[1:])
    assert not layer.running_mean.any()
    optimizer.step()
    torch.testing.assert_close(layer.running_mean, 0.5 * x.mean((0, 2, 3)))
    square = x.square().mean((0, 2, 3))  # about the old mean, 0
    torch.testing.assert_close(layer.running_var, 0.5 + 0.5 * square)


def test_nothing_to_follow():
    model = nn.Sequential(nk.BCN(8))
    with pytest.raises(NothingToDo, match="micro=True"):
        nk.follow_learning_rate(model, torch.optim.SGD(model.parameters(), lr=0.1))
