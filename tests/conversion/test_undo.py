"""undo: the model is again what it was, bit for bit."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from normkit.conversion import plan_conversion
from subjects import TARGETS, Net, images, output, portrait, trained

WHERE = dict.fromkeys(("in", "ibn", "gw"), "!flat")


@pytest.mark.parametrize("target", TARGETS)
def test_bit_for_bit(target: str) -> None:
    model = trained(Net()).train()
    model.stem.eval()
    x = images()
    before, expected = portrait(model), output(model, x)
    plan = plan_conversion(model, target, WHERE.get(target))
    plan.apply(x)
    assert portrait(model) != before
    plan.undo()
    assert portrait(model) == before
    assert torch.equal(output(model, x), expected)


def test_again_and_again() -> None:
    model = trained(Net())
    x = images()
    before, plan = portrait(model), plan_conversion(model, "bcn")
    numbers = set()
    for _ in range(3):
        numbers.add(plan.apply(x).difference)
        plan.undo()
    assert len(numbers) == 1
    assert portrait(model) == before


@pytest.mark.parametrize("target", ["gn", "ubn", "frozen_bn"])
def test_old_layers_come_back_with_their_values_after_training(target: str) -> None:
    model = trained(Net())
    kept = {path: model.get_submodule(path).state_dict() for path in ("bn", "shared", "flat")}
    kept = {path: {k: v.clone() for k, v in found.items()} for path, found in kept.items()}
    plan = plan_conversion(model, target)
    plan.apply(images())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.train()(images(8)).square().sum().backward()
    optimizer.step()
    head = model.head.weight.detach().clone()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        plan.undo()
    trained_since = target != "frozen_bn"  # which nothing trains
    assert [w.category for w in seen] == [UserWarning] * trained_since
    for path, values in kept.items():
        now = model.get_submodule(path).state_dict()
        assert all(torch.equal(now[name], value) for name, value in values.items())
    assert torch.equal(model.head.weight, head)


def test_the_mode_of_the_model_in_the_meantime_holds() -> None:
    model = trained(Net()).train()
    plan = plan_conversion(model, "gn")
    plan.apply(images())
    model.eval()
    plan.undo()
    assert not any(m.training for m in model.modules())


def test_the_type_of_the_model_in_the_meantime_holds() -> None:
    model = trained(Net())
    plan = plan_conversion(model, "ubn")
    plan.apply(images())
    model.double()
    plan.undo()
    assert {t.dtype for t in model.parameters()} == {torch.float64}
    assert output(model, images().double()).dtype == torch.float64


@pytest.mark.gpu
def test_the_device_of_the_model_in_the_meantime_holds() -> None:
    model = trained(Net())
    plan = plan_conversion(model, "bn")
    plan.apply(images())
    model.cuda()
    plan.undo()
    assert all(t.is_cuda for t in (*model.parameters(), *model.buffers()))


def test_hooks_of_the_meantime_stay() -> None:
    model = trained(Net())
    plan = plan_conversion(model, "gn")
    plan.apply(images())
    seen = []
    model.shared.register_forward_hook(lambda m, *_: seen.append(type(m)))
    plan.undo()
    output(model, images())
    assert seen == [nn.BatchNorm2d] * 2


def test_an_interruption_while_measuring_leaves_the_model_alone() -> None:
    model = trained(Net())
    plan = plan_conversion(model, "gn")
    calls = []

    def interrupt(*_: object) -> None:
        calls.append(type(model.stem[1]).__name__)
        if calls[-1] == "GN":
            raise KeyboardInterrupt

    model.register_forward_pre_hook(interrupt)
    before = portrait(model)
    with pytest.raises(KeyboardInterrupt):
        plan.apply(images())
    assert calls == ["BatchNorm2d", "GN"]
    assert portrait(model) == before
