"""Optimizers that exist already go on with the converted model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

import normkit as nk
from normkit.conversion import Plan, convert, plan_conversion
from normkit.conversion.edits import ReplaceModule
from normkit.conversion.recipes.scaled_bn import AddInputNorm
from normkit.conversion.standardize import Standardize
from normkit.errors import OptionError
from subjects import Net, images, trained

MAKERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda params: SGD(params, lr=0.1, momentum=0.9),
    "adam": lambda params: Adam(params, lr=0.01),
    "adamw-foreach": lambda params: AdamW(params, lr=0.01, foreach=True),
}


def stepped(model: nn.Module, optimizer: Optimizer, steps: int = 2) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(images(8)).square().mean().backward()
        optimizer.step()


def held(optimizer: Optimizer) -> list[list[int]]:
    return [[id(p) for p in group["params"]] for group in optimizer.param_groups]


def everything(optimizer: Optimizer) -> set[int]:
    found = [p for group in held(optimizer) for p in group]
    assert len(set(found)) == len(found)
    return set(found)


def state(optimizer: Optimizer) -> dict[int, dict[str, Any]]:
    return {
        id(p): {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in found.items()}
        for p, found in optimizer.state.items()
    }


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("target", ["gn", "bcn", "ubn", "rbn", "frozen_bn", "bn", "torch_gn"])
def test_it_holds_the_parameters_of_the_converted_model(
    target: str, make: Callable[[Any], Optimizer]
) -> None:
    model = trained(Net())
    optimizer = make(model.parameters())
    stepped(model, optimizer)
    before, memory = held(optimizer), state(optimizer)
    plan = plan_conversion(model, target, optimizer=optimizer)
    assert held(optimizer) == before
    plan.apply(images())
    assert everything(optimizer) == {id(p) for p in model.parameters()}
    plan.undo()
    assert held(optimizer) == before
    assert state(optimizer) == memory
    plan.apply(images())
    stepped(model, optimizer)
    assert all(optimizer.state[p] for p in model.parameters())


def test_what_means_the_same_is_the_same_parameter() -> None:
    """So that an optimizer which nobody mentions is right as well."""
    model = trained(Net())
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    stepped(model, optimizer)
    before = {id(p): optimizer.state[p]["momentum_buffer"].clone() for p in model.parameters()}
    weight = model.shared.weight
    convert(model, "gn", example=images())
    assert model.shared.weight is weight
    for p in model.parameters():
        assert torch.equal(optimizer.state[p]["momentum_buffer"], before[id(p)])
    old = weight.detach().clone()
    stepped(model, optimizer, 1)
    assert not torch.equal(model.shared.weight, old)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("steps_before", [0, 2])
def test_undo_after_training_brings_momentum_back(
    steps_before: int, make: Callable[[Any], Optimizer]
) -> None:
    """The values of shared parameters came back, and the momentum of later steps stayed."""
    model = trained(Net())
    optimizer = make(model.parameters())
    stepped(model, optimizer, steps_before)
    norms = [p for m in (model.stem[1], model.bn, model.shared, model.flat) for p in m.parameters()]
    ids = set(map(id, norms))
    memory = {key: value for key, value in state(optimizer).items() if key in ids}
    plan = plan_conversion(model, "gn", optimizer=optimizer)
    plan.apply(images())
    assert all(any(p is q for q in model.parameters()) for p in norms)
    stepped(model, optimizer)
    with pytest.warns(UserWarning, match="have been trained since"):
        plan.undo()
    assert {key: value for key, value in state(optimizer).items() if key in ids} == memory
    stepped(model, optimizer)


def test_new_parameters_that_no_optimizer_knows_are_told_of() -> None:
    model = trained(Net())
    assert "are new: make the optimizer" in plan_conversion(model, "ubn").apply(images()).note
    model = trained(Net())
    assert plan_conversion(model, "gn").apply(images()).note == ""  # the parameters are the same


def test_what_means_something_else_starts_anew() -> None:
    """rbn divides its weight by the gate: the momentum of the old one has another scale."""
    model = trained(Net())
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    stepped(model, optimizer)
    bias, buffer = model.flat.bias, optimizer.state[model.flat.bias]["momentum_buffer"]
    plan = plan_conversion(model, "rbn", "flat", optimizer=optimizer)
    certificate = plan.apply(images())
    assert model.flat.bias is bias
    assert optimizer.state[bias]["momentum_buffer"] is buffer
    assert model.flat.weight not in optimizer.state
    assert certificate.note == (
        "SGD: 1 norm parameter(s) stay as they are; 4 added, 0 of them with the state of the one "
        "before; 1 removed."
    )


def test_momentum_goes_on_where_an_edit_names_the_role() -> None:
    model = trained(Net())
    optimizer = Adam(model.parameters(), lr=0.01)
    stepped(model, optimizer)
    old = optimizer.state[model.flat.weight]["exp_avg"].clone()
    new = nk.GN(8)
    edit = ReplaceModule("flat", new, roles={"weight": "weight"})
    Plan(model, [edit], [], optimizer=optimizer).apply(images())
    assert torch.equal(optimizer.state[new.weight]["exp_avg"], old)
    assert optimizer.state[new.weight]["step"] == 2
    assert new.bias not in optimizer.state


def test_new_parameters_join_the_group_of_the_old_ones() -> None:
    model = trained(Net())
    norms = [p for m in (model.stem[1], model.bn, model.shared, model.flat) for p in m.parameters()]
    ids = set(map(id, norms))
    rest = [p for p in model.parameters() if id(p) not in ids]
    optimizer = SGD([{"params": rest}, {"params": norms, "lr": 0.001}], lr=0.1)
    schedule = LambdaLR(optimizer, lambda step: 0.5**step)
    optimizer.step()
    convert(model, "ubn", example=images(), optimizer=optimizer)
    groups = optimizer.param_groups
    assert [id(p) for p in groups[0]["params"]] == [id(p) for p in rest]
    inside = {id(p) for p in groups[1]["params"]}
    assert {id(p) for p in model.shared.parameters()} < inside
    schedule.step()
    assert groups[1]["lr"] == 0.0005


def test_norms_that_were_not_trained_are_not_put_in() -> None:
    model = trained(Net())
    optimizer = SGD(model.head.parameters(), lr=0.1)
    before = held(optimizer)
    convert(model, "bcn", example=images(), optimizer=optimizer)
    assert held(optimizer) == before


def test_parameters_without_a_predecessor_join_the_first_group() -> None:
    model = trained(Net())
    optimizer = SGD(model.parameters(), lr=0.1)
    norm = nk.BN(3)
    plan = Plan(model, [AddInputNorm(norm), Standardize("conv", "wn")], [], optimizer=optimizer)
    plan.apply(images())
    assert everything(optimizer) == {id(p) for p in model.parameters()}


def test_several_optimizers() -> None:
    model = trained(Net())
    one, two = SGD(model.stem.parameters(), lr=0.1), Adam(model.flat.parameters(), lr=0.1)
    convert(model, "rbn", example=images(), optimizer=[one, two])
    assert everything(one) == {id(p) for p in model.stem.parameters()}
    assert everything(two) == {id(p) for p in model.flat.parameters()}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda model: torch.optim.LBFGS(model.parameters()), "LBFGS"),
        (lambda model: SGD(Net().parameters(), lr=0.1), "no parameter of this model"),
        (lambda model: "sgd", "got str"),
    ],
)
def test_wrong_optimizers_are_refused(make: Callable[[nn.Module], Any], words: str) -> None:
    model = trained(Net())
    with pytest.raises(OptionError, match=words):
        convert(model, "bn", optimizer=make(model))
    assert type(model.shared) is nn.BatchNorm2d


def test_an_error_leaves_the_optimizer_alone() -> None:
    model = trained(Net())
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    stepped(model, optimizer)
    before, memory = held(optimizer), state(optimizer)
    model.register_forward_hook(lambda m, *_: m.stem[1].running_mean)  # gn has none
    with pytest.raises(OptionError, match="converted model fails"):
        convert(model, "gn", example=images(), optimizer=optimizer)
    assert held(optimizer) == before
    assert state(optimizer) == memory


class Outer(SGD):
    """An optimizer around another one, with the same groups or with its own."""

    def __init__(self, params: Any, own: bool) -> None:
        super().__init__(params, lr=0.1)
        self.inner = SGD([p for group in self.param_groups for p in group["params"]], lr=0.1)
        if not own:
            self.inner.param_groups = self.param_groups


def test_an_optimizer_inside_another_one() -> None:
    """ZeroRedundancyOptimizer went on to train the parameters that had left the model."""
    model = trained(Net())
    with pytest.raises(OptionError, match="after the conversion"):
        plan_conversion(model, "ubn", optimizer=Outer(model.parameters(), own=True))
    alike = Outer(model.parameters(), own=False)
    convert(model, "ubn", example=images(), optimizer=alike)
    assert everything(alike.inner) == {id(p) for p in model.parameters()}


@pytest.mark.parametrize("target", ["ubn", "rbn", "bnet", "bcn", "sn"])
def test_groups_stay_what_param_groups_makes_of_the_new_model(target: str) -> None:
    """Gates, shifts and kernels came to the scales, and so were trained a hundred times slower."""
    model = trained(Net())
    optimizer = SGD(nk.param_groups(model, 0.1, 1e-4), momentum=0.9)
    convert(model, target, example=images(), optimizer=optimizer)
    wanted = {group["name"]: group for group in nk.param_groups(model, 0.1, 1e-4)}
    for group in optimizer.param_groups:
        expected = {id(p) for p in wanted[group["name"]]["params"]} if group["params"] else set()
        assert {id(p) for p in group["params"]} == expected


def test_a_norm_of_the_input_joins_the_scales() -> None:
    model = trained(Net())
    optimizer = SGD(nk.param_groups(model, 0.1, 1e-4), momentum=0.9)
    nk.recipes.scaled_bn(model, optimizer=optimizer).apply(images())
    groups = {id(p): g["name"] for g in optimizer.param_groups for p in g["params"]}
    assert groups[id(model.input_norm.weight)] == "scales"
    assert groups[id(model.input_norm.bias)] == "not_decayed"


def test_new_parameters_take_the_rate_of_the_old_shift() -> None:
    model = trained(Net())
    scales = [m.weight for m in (model.stem[1], model.bn, model.shared, model.flat)]
    ids = set(map(id, scales))
    rest = [p for p in model.parameters() if id(p) not in ids]
    optimizer = SGD([{"params": rest}, {"params": scales, "lr": 0.001}], lr=0.1)
    convert(model, "rbn", example=images(), optimizer=optimizer)
    slow = {id(p) for p in optimizer.param_groups[1]["params"]}
    assert slow == {id(m.weight) for m in (model.stem[1], model.bn, model.shared, model.flat)}
