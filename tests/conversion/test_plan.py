"""Plans: what they say, and that saying it changes nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import normkit as nk
from normkit.conversion import Plan, Step, plan_conversion
from normkit.conversion.edits import ReplaceModule, SetTensor
from normkit.conversion.recipes.scaled_bn import AddInputNorm
from normkit.conversion.standardize import Standardize
from normkit.errors import NothingToDo, OptionError
from subjects import PATHS, Net, images, output, portrait, trained


def test_a_plan_changes_nothing() -> None:
    model = trained(Net())
    model(images(8)).sum().backward()
    before, gradients = portrait(model), [id(p.grad) for p in model.parameters()]
    random = torch.get_rng_state()
    for target in ("bn", "ubn", "gn", "frozen_bn"):
        print(plan_conversion(model, target, example=images(2)))
    torch.set_rng_state(random)
    assert portrait(model) == before
    assert [id(p.grad) for p in model.parameters()] == gradients


def test_no_random_number_is_used_up() -> None:
    model = trained(Net())
    x, random = images(), torch.get_rng_state()
    plan_conversion(model, "bcn").apply(x)
    assert torch.equal(torch.get_rng_state(), random)


def test_a_plan_in_words() -> None:
    model = trained(Net())
    model.norm = nn.LayerNorm(4)
    text = str(plan_conversion(model, "bcn", groups=4))
    lines = text.splitlines()
    assert lines[0] == (
        "Net to bcn: 4 of 5 norms to convert, 1 kept. The function changes: apply() measures by "
        "how much."
    )
    assert lines[1].startswith("Each layer: carries weight, bias, running statistics, eps")
    rows = {line.split()[0]: line for line in lines if line[:1].strip()}
    assert list(rows)[-7:-1] == ["layer", *PATHS, "norm"]
    assert lines[-1].startswith("8 parameter(s) are new: make the optimizer now")
    assert "BatchNorm2d(8) → BCN(8, groups=4)" in rows["stem.1"]
    assert "BatchNormAct2d(16) + Dropout + SiLU → BCN(16, groups=4) + Dropout + SiLU" in rows["bn"]
    assert "shared by shared, again" in text
    assert "keep: no batch norm, and not asked for" in text
    assert "skip: it normalizes the last axis" in str(plan_conversion(model, "bcn", "kind:ln"))
    assert max(map(len, lines)) <= 120


def test_an_applied_plan_shows_its_certificate() -> None:
    model = trained(Net())
    plan = plan_conversion(model, "bn")
    assert repr(plan) == "<Plan: Net to bn, 4 norm(s) to convert, not applied>"
    assert "Applied" not in str(plan)
    certificate = plan.apply(images())
    assert plan.applied
    assert str(certificate) in str(plan)
    assert plan.apply() is certificate
    plan.undo()
    assert not plan.applied
    with pytest.raises(NothingToDo, match="not applied"):
        plan.undo()


def test_steps_tell_what_is_carried() -> None:
    plan = plan_conversion(trained(Net()), "frozen_bn")
    step = plan.steps[0]
    assert (step.path, step.action, step.exact) == ("stem.1", "convert", True)
    assert step.carried == ("weight", "bias", "running statistics", "eps")
    assert step.lost == ()
    assert "buffers" in step.reason
    gn = plan_conversion(trained(Net()), "gn", affine=False).steps[0]
    assert gn.lost == ("weight", "bias", "running statistics")


def test_plans_are_made_with_an_example_that_shows_what_feeds_what() -> None:
    model = trained(Net())
    plan = plan_conversion(model, "gn", lambda site: site.fed_by == "twice", example=images())
    assert [step.path for step in plan.steps] == ["shared"]
    assert plan.apply().probe == "the given input (4, 3, 8, 8)"


@pytest.mark.parametrize("change", ["values", "module", "type"])
def test_a_model_that_changed_since_needs_a_new_plan(change: str) -> None:
    model = trained(Net())
    plan = plan_conversion(model, "gn")
    if change == "values":
        model.train()(images(8))
    elif change == "module":
        model.flat = nn.BatchNorm1d(8)
    else:
        model.double()
    before = portrait(model)
    with pytest.raises(OptionError, match="new plan"):
        plan.apply(images())
    assert portrait(model) == before


def test_plans_from_edits() -> None:
    model = trained(Net())
    edits = [
        ReplaceModule("stem.1", nk.GN(8)),
        SetTensor("stem.1.weight", 0.5),
        Standardize("conv", "ws"),
        AddInputNorm(nk.InputNorm(3)),
    ]
    steps = [Step("stem.1", "BatchNorm2d(8)", "GN(8)")]
    before, x = portrait(model), images()
    plan = Plan(model, edits, steps, title="recipe")
    assert portrait(model) == before
    assert not plan.exact
    assert "Besides:\n  stem.1.weight gets new values" in str(plan)
    certificate = plan.apply(x)
    assert isinstance(model.input_norm, nk.InputNorm)
    assert torch.equal(model.stem[1].weight, torch.full((8,), 0.5))
    assert certificate.difference > 0.01
    expected = output(model, x)
    assert torch.equal(output(copy.deepcopy(model), x), expected)
    plan.undo()
    assert portrait(model) == before


def test_the_certificate_compares_layers_as_they_are_in_the_end() -> None:
    """A recipe converts first and then sets values: both belong to the layer's difference."""
    model = nn.Sequential(trained(nn.BatchNorm2d(3))).eval()
    (first,) = plan_conversion(model, "bn").edits
    plan = Plan(model, [first, SetTensor("0.weight", 0.0)], [])
    x = images()
    old = model(x)
    certificate = plan.apply(x)
    shift = old - model[0].bias[:, None, None]
    expected = (shift.abs().max() / old.abs().max()).item()
    assert certificate.layers["0"] == pytest.approx(expected, rel=1e-5)


def test_later_plans_are_undone_first() -> None:
    model = trained(Net())
    before = portrait(model)
    first = plan_conversion(model, "bn")
    first.apply(images())
    middle = portrait(model)
    second = plan_conversion(model, "ubn")
    second.apply(images())
    with pytest.raises(OptionError, match="later first"):
        first.undo()
    second.undo()
    assert portrait(model) == middle
    first.undo()
    assert portrait(model) == before


def test_every_edit_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a trial nor the measurement does it: the new layers are built, and placed, once."""
    built, done = [], []
    build, do = nk.UBN.__init__, ReplaceModule.do

    def counting_build(self: nk.UBN, *args: Any, **options: Any) -> None:
        built.append(self)
        build(self, *args, **options)

    def counting_do(self: ReplaceModule, model: nn.Module) -> None:
        done.append(self)
        do(self, model)

    monkeypatch.setattr(nk.UBN, "__init__", counting_build)
    monkeypatch.setattr(ReplaceModule, "do", counting_do)
    plan = plan_conversion(trained(Net()), "ubn")
    assert (len(built), len(done)) == (len(PATHS), 0)
    assert plan.apply(images()).exact
    assert (len(built), len(done)) == (len(PATHS), len(PATHS))
