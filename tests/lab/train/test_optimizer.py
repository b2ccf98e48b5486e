"""Groups, optimizers and rates against torch's own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import normkit as nk
from lab.train.stand_ins import network
from normkit.errors import OptionError
from normkit.lab.experiment import Train
from normkit.lab.models.variant import learning_rate_followers
from normkit.lab.train.optimizer import Rates, groups_of, load_state, optimizer_of, rate, state_of

CPU = torch.device("cpu")
STEPS = 4


def by_decay(model: nn.Module, train: Train) -> dict[str, tuple[float, float]]:
    """Name of a parameter -> its rate and decay."""
    names = {p: name for name, p in model.named_parameters()}
    return {
        names[p]: (group["lr"], group["weight_decay"])
        for group in groups_of(model, train)
        for p in group["params"]
    }


def test_all_parameters_are_decayed_by_default() -> None:
    found = by_decay(network(), Train(lr=0.1, weight_decay=5e-4))
    assert set(found.values()) == {(0.1, 5e-4)}
    assert len(found) == 8
    assert len(groups_of(network(), Train())) == 1


def test_weights_alone_are_decayed() -> None:
    found = by_decay(network(), Train(lr=0.1, weight_decay=1e-4, decay="weights"))
    assert {name for name, (_, decay) in found.items() if decay} == {
        "0.weight",
        "4.weight",
        "8.weight",
    }
    assert {lr for lr, _ in found.values()} == {0.1}


@pytest.mark.parametrize("decay", ["all", "weights"])
def test_scales_of_norms_learn_slower(decay: str) -> None:
    found = by_decay(network(), Train(lr=0.1, slower_scale=100, decay=decay))
    assert {name for name, (lr, _) in found.items() if lr == pytest.approx(0.001)} == {
        "1.weight",
        "5.weight",
    }
    assert found["1.weight"][1] == (1e-4 if decay == "all" else 0.0)


def test_parameters_that_do_not_learn_are_left_out() -> None:
    model = network()
    model[1].bias.requires_grad_(False)
    assert "1.bias" not in by_decay(model, Train())


OPTIMIZERS = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "nesterov": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True),
    "plain": lambda groups: torch.optim.SGD(groups, lr=0.1),
    "adam": lambda groups: torch.optim.Adam(groups, lr=0.1),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.1),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_steps_are_torch_s(kind: str) -> None:
    name = {"nesterov": "sgd", "plain": "sgd"}.get(kind, kind)
    momentum = 0.0 if kind == "plain" else 0.9
    train = Train(
        epochs=2,
        lr=0.1,
        optimizer=name,
        momentum=momentum,
        nesterov=kind == "nesterov",
        decay="weights",
        slower_scale=10,
        floor=1e-3,
    )
    mine, theirs = network().double(), network().double()
    optimizer = optimizer_of(mine, train, CPU)
    rates = Rates(optimizer, train, STEPS, [])
    plain = OPTIMIZERS[kind](groups_of(theirs, train))
    bases = [group["lr"] for group in plain.param_groups]
    for step in range(2 * STEPS):
        for p, q in zip(mine.parameters(), theirs.parameters(), strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        for group, base in zip(plain.param_groups, bases, strict=True):
            group["lr"] = rate(train, base, step, STEPS)
        rates.write(step)
        optimizer.step()
        plain.step()
    for p, q in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)


def test_a_state_can_be_put_back() -> None:
    model = network()
    optimizer = optimizer_of(model, Train(), CPU)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    kept = [{k: t.clone() for k, t in each.items()} for each in state_of(optimizer)]
    where = [t.data_ptr() for each in state_of(optimizer) for t in each.values()]
    optimizer.step()
    load_state(optimizer, kept)
    assert [t.data_ptr() for each in state_of(optimizer) for t in each.values()] == where
    for mine, given in zip(state_of(optimizer), kept, strict=True):
        assert all(torch.equal(mine[name], given[name]) for name in given)


def micro_network() -> nn.Module:
    return network(lambda c: nk.BCN(c, groups=2, micro=True))


def test_micro_batch_layers_follow_the_rate_as_by_hooks() -> None:
    train = Train(epochs=2, lr=0.3, momentum=0.0, warmup=0.5, weight_decay=0.0)
    mine, theirs = micro_network(), micro_network()
    optimizer = optimizer_of(mine, train, CPU)
    rates = Rates(optimizer, train, STEPS, learning_rate_followers(mine))
    plain = torch.optim.SGD(theirs.parameters(), lr=0.3)
    nk.follow_learning_rate(theirs, plain)
    for step in range(2 * STEPS):
        images = torch.randn(3, 2, 5, 5)
        rates.write(step)
        plain.param_groups[0]["lr"] = rate(train, 0.3, step, STEPS)
        for model, each in ((mine, optimizer), (theirs, plain)):
            each.zero_grad()
            model(images).square().mean().backward()
            each.step()
        assert torch.equal(mine[1].rate, theirs[1].rate)
    assert torch.equal(mine[1].running_mean, theirs[1].running_mean)
    assert torch.equal(mine[5].running_var, theirs[5].running_var)


def test_a_rate_above_one_is_one_for_a_layer() -> None:
    train = Train(epochs=1, lr=3.0, schedule="constant")
    model = micro_network()
    Rates(optimizer_of(model, train, CPU), train, STEPS, learning_rate_followers(model)).write(0)
    assert model[1].rate.item() == 1.0


def test_a_layer_with_its_own_rate_keeps_it() -> None:
    model = network(lambda c: nk.BCN(c, groups=2, micro=True, update_rate=0.25))
    train = Train(epochs=1, lr=0.1)
    Rates(optimizer_of(model, train, CPU), train, STEPS, learning_rate_followers(model)).write(1)
    assert model[1].rate.item() == 0.25


@pytest.mark.parametrize("option", [{"optimizer": "sdg"}, {"decay": "weight"}])
def test_unknown_names_are_refused(option: dict[str, str]) -> None:
    with pytest.raises(OptionError, match="Did you mean"):
        optimizer_of(network(), Train(**option), CPU)  # type: ignore[arg-type]
