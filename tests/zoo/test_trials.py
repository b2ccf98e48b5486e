"""A trial finds nothing wrong where nothing is wrong, and what is wrong where something is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import normkit as nk
from normkit.conversion import Plan, plan_conversion
from tools.zoo import trial
from tools.zoo.results import Task
from tools.zoo.trial import attempt

TARGETS = ("bn", "gn", "bcn", "ubn")
# small ones of different make: plain norms, fused activations, branches, aux outputs, detectors
MODELS = (
    "timm:test_resnet",
    "timm:test_efficientnet",
    "timm:test_byobnet",
    "timm:ghostnet_050",
    "timm:test_vit",  # layer norms over the last axis: nothing to convert
    "torchvision:regnet_y_400mf",  # cannot be built on the meta device
    "torchvision:convnext_tiny",  # layer norms over the channels
    "torchvision:lraspp_mobilenet_v3_large",
    "torchvision:fasterrcnn_mobilenet_v3_large_320_fpn",
)


# two targets a model, each of the others with several: how a norm is converted does not know of
# the model, and where it stands not of the target
PAIRS = [(reference, ("ubn", TARGETS[i % 3])) for i, reference in enumerate(MODELS)]


@pytest.mark.parametrize(("reference", "targets"), PAIRS, ids=MODELS)
def test_small_models_pass(reference: str, targets: tuple[str, ...]) -> None:
    report = attempt(Task(reference, targets, runs=True))
    assert report.failures == []
    assert {to: outcome.failures for to, outcome in report.outcomes.items()} == {
        to: [] for to in targets
    }
    for outcome in report.outcomes.values():
        counted = outcome.converted + outcome.kept + sum(outcome.skipped.values())
        assert counted == report.norms > 0
    batch_norms = reference not in ("timm:test_vit", "torchvision:convnext_tiny")
    assert report.outcomes["ubn"].exact == batch_norms
    assert (report.outcomes["ubn"].converted == report.norms) == batch_norms
    assert bool(report.input) == (reference != "timm:test_vit")


def test_nothing_is_run_on_the_meta_device() -> None:
    report = attempt(Task("timm:test_efficientnet", TARGETS))
    assert report.passed
    assert report.input == ""
    assert {outcome.difference for outcome in report.outcomes.values()} == {None}


def test_a_model_that_cannot_be_built() -> None:
    report = attempt(Task("torchvision:regnet_y_400mf", TARGETS))
    assert not report.passed
    assert "could not be built" in report.failures[0]


# ---------------------------------------------------------------- sabotage

Damage = Callable[[nn.Module, Plan], None]
FIRST = "bn1"  # of timm:test_efficientnet; a batch norm with a fused activation


def _set(model: nn.Module, name: str, module: nn.Module | None) -> None:
    model._modules[name] = module


def _drop_activation(model: Any, plan: Plan) -> None:
    _set(model, FIRST, model.bn1.norm)


def _remove(model: Any, plan: Plan) -> None:
    _set(model, FIRST, nn.Identity())


def _forget(model: Any, plan: Plan) -> None:
    _set(model, FIRST, nn.BatchNorm2d(model.bn1.norm.channels))


def _touch_another(model: Any, plan: Plan) -> None:
    _set(model, "conv_stem", nn.Conv2d(1, 1, 1))


def _other_eps(model: Any, plan: Plan) -> None:
    model.bn1.norm.eps = 0.5


def _other_mode(model: Any, plan: Plan) -> None:
    model.bn1.train(not model.bn1.training)


def _other_activation(model: Any, plan: Plan) -> None:
    model.bn1.act = nn.Tanh()


def _no_reason(model: Any, plan: Plan) -> None:
    object.__setattr__(plan.steps[0], "lost", ())
    object.__setattr__(plan.steps[0], "carried", ())


def _no_way_back(model: Any, plan: Plan) -> None:
    plan.undo = lambda: None  # type: ignore[method-assign]


def _half_way_back(model: Any, plan: Plan) -> None:
    whole = plan.undo

    def undo() -> None:
        whole()
        model.bn1.weight.requires_grad_(not model.bn1.weight.requires_grad)

    plan.undo = undo  # type: ignore[method-assign]


def _lose_scale(model: Any, plan: Plan) -> None:
    model.bn1.norm.weight = nn.Parameter(torch.ones(model.bn1.norm.channels))


def _stop_gradient(model: Any, plan: Plan) -> None:
    model.bn1.norm.register_forward_hook(lambda module, args, output: output.detach())


def _spoil_values(model: Any, plan: Plan) -> None:
    whole = plan.undo

    def undo() -> None:
        whole()
        with torch.no_grad():
            model.bn1.running_var[0] += 1e-6

    plan.undo = undo  # type: ignore[method-assign]


SABOTAGE: dict[str, tuple[Damage, bool, str]] = {
    "activation dropped": (_drop_activation, False, "bn1: its activation"),
    "activation changed": (_other_activation, False, "bn1: its activation"),
    "norm removed": (_remove, False, "norms came or went: bn1"),
    "norm left as it was": (_forget, False, "bn1: kind should be gn and is bn"),
    "another module changed": (_touch_another, False, "conv_stem is another module"),
    "eps changed": (_other_eps, False, "bn1: eps should be"),
    "mode changed": (_other_mode, False, "bn1: training should be"),
    "loss not mentioned": (_no_reason, False, "is neither carried nor lost"),
    "no way back": (_no_way_back, False, "undo: bn1 is another module"),
    "half a way back": (_half_way_back, False, "undo: bn1.weight: requires_grad changed"),
    "scale lost": (_lose_scale, True, "weight is said to be carried, and has other values"),
    "no gradient": (_stop_gradient, True, "gets no gradient"),
    "values spoilt": (_spoil_values, True, "undo: bn1.running_var has other values"),
}


@pytest.mark.parametrize(("damage", "runs", "said"), SABOTAGE.values(), ids=SABOTAGE)
def test_sabotage_is_found(
    monkeypatch: pytest.MonkeyPatch, damage: Damage, runs: bool, said: str
) -> None:
    def plan_worse(model: nn.Module, target: str) -> Plan:
        plan = plan_conversion(model, target)
        apply = plan.apply

        def then_damage(example: Any = None) -> Any:
            certificate = apply(example)
            damage(model, plan)
            return certificate

        plan.apply = then_damage  # type: ignore[method-assign]
        return plan

    monkeypatch.setattr(trial, "plan_conversion", plan_worse)
    report = attempt(Task("timm:test_efficientnet", ("gn",), runs))
    found = report.outcomes["gn"].failures
    assert any(said in failure for failure in found), found


def test_a_norm_that_the_survey_overlooks(monkeypatch: pytest.MonkeyPatch) -> None:
    def half_blind(model: nn.Module) -> Any:
        found = nk.inspection.survey(model)
        return nk.inspection.Survey(found.sites[1:])

    monkeypatch.setattr(trial, "survey", half_blind)
    report = attempt(Task("timm:test_efficientnet", ("gn",)))
    assert report.failures == ["bn1 (BatchNormAct2d) is missing from the survey"]
    assert "survey and plan differ: bn1" in report.outcomes["gn"].failures


def test_a_false_promise_of_exactness(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Plan, "exact", True)
    report = attempt(Task("timm:test_resnet", ("gn",), runs=True))
    found = report.outcomes["gn"].failures
    assert any("said to be exact, but the output differs by" in failure for failure in found)
    assert any("the certificate contradicts the plan" in failure for failure in found)


def test_one_bad_target_does_not_spoil_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse_gn(model: nn.Module, target: str) -> Plan:
        if target == "gn":
            _set(model, FIRST, nn.Identity())
            raise RuntimeError("in the middle")
        return plan_conversion(model, target)

    monkeypatch.setattr(trial, "plan_conversion", refuse_gn)
    report = attempt(Task("timm:test_efficientnet", ("gn", "bn")))
    assert "RuntimeError: in the middle" in report.outcomes["gn"].failures[0]
    assert report.outcomes["bn"].failures == []
