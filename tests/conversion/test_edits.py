"""Edits: each can be taken back, and an error takes all of them back."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import normkit as nk
from normkit.conversion.edits import Edit, ReplaceModule, SetTensor, do_all, undo_all
from normkit.conversion.recipes.scaled_bn import AddInputNorm
from normkit.conversion.standardize import Standardize
from normkit.errors import OptionError, UnknownName
from subjects import Net, images, output, portrait, trained


def edits() -> list[Edit]:
    return [
        ReplaceModule(["shared", "again"], nk.GN(16)),
        SetTensor("flat.running_mean", torch.ones(8)),
        SetTensor("head.weight", 0.25),
        Standardize("conv", "ws", variant="bcn"),
        Standardize("twice", "wn"),
        AddInputNorm(nk.BN(3), "first"),
    ]


@pytest.mark.parametrize("edit", edits(), ids=repr)
def test_each_edit_can_be_taken_back(edit: Edit) -> None:
    model = trained(Net())
    before, x = portrait(model), images()
    expected = output(model, x)
    for _ in range(2):
        edit.check(model)
        edit.do(model)
        assert portrait(model) != before
        assert not torch.equal(output(model, x), expected)
        edit.check_undo(model)
        edit.undo(model)
        assert portrait(model) == before
        assert torch.equal(output(model, x), expected)
        edit.undo(model)  # once more is no harm
        assert portrait(model) == before


def test_edits_say_what_they_do() -> None:
    assert [edit.description for edit in edits()] == [
        "shared, again becomes GN",
        "flat.running_mean gets new values",
        "head.weight gets new values",
        "the weight of conv is computed by WS",
        "the weight of twice is computed by WN",
        "first = BN before everything else",
    ]


class Fails(Edit):
    description = "fails"

    def __init__(self, error: BaseException, when: str) -> None:
        self.error, self.when = error, when

    def check(self, model: nn.Module) -> None:
        if self.when == "check":
            raise self.error

    def do(self, model: nn.Module) -> None:
        raise self.error

    def undo(self, model: nn.Module) -> None:
        pass


@pytest.mark.parametrize("when", ["check", "do"])
@pytest.mark.parametrize("error", [OptionError("no"), KeyboardInterrupt()], ids=repr)
def test_an_error_takes_all_back(error: BaseException, when: str) -> None:
    model = trained(Net())
    before = portrait(model)
    with pytest.raises(type(error)):
        do_all(model, (*edits(), Fails(error, when)))
    assert portrait(model) == before


def test_all_and_back() -> None:
    model = trained(Net())
    before = portrait(model)
    done = tuple(edits())
    do_all(model, done)
    undo_all(model, done)
    assert portrait(model) == before


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: ReplaceModule("bn9", nk.GN(4)), OptionError, "not the module"),
        (lambda: ReplaceModule("", nk.GN(4)), OptionError, "wrap it"),
        (lambda: ReplaceModule("flat", nk.GN(4), old=nn.BatchNorm1d(8)), OptionError, "new plan"),
        (lambda: SetTensor("flat.wait", 1.0), OptionError, "no tensor 'flat.wait'"),
        (lambda: SetTensor("flat.weight", torch.ones(3)), OptionError, r"\(8,\).*\(3,\)"),
        (lambda: Standardize("conv", "wss"), UnknownName, "Did you mean 'ws'"),
        (lambda: Standardize("bn"), Exception, "bn: "),
        (lambda: AddInputNorm(nk.BN(3), "stem"), OptionError, "'stem' already"),
    ],
)
def test_what_cannot_be_done_is_said(make: Any, error: type[Exception], words: str) -> None:
    model = trained(Net())
    before = portrait(model)
    with pytest.raises(error, match=words):
        make().check(model)
    assert portrait(model) == before


def test_an_input_norm_belongs_to_each_copy() -> None:
    model = trained(Net())
    edit = AddInputNorm(nk.BN(3))
    edit.do(model)
    x = images() * 3 + 1
    inner = copy.deepcopy(model)
    inner.input_norm.weight.data.mul_(2)
    assert torch.equal(output(pickle.loads(pickle.dumps(model)), x), output(model, x))
    assert not torch.equal(output(inner, x), output(model, x))
    edit.undo(model)
    expected = output(model, model_input := images())
    edit.do(model)
    model.input_norm = nn.Identity()
    assert torch.equal(output(model, model_input), expected)


def test_an_input_norm_takes_keyword_arguments() -> None:
    model = trained(Net())
    AddInputNorm(nk.BN(3)).do(model)
    x = images()
    assert torch.equal(model.eval()(x=x), model(x))


def test_an_input_norm_runs_once_in_a_sequential() -> None:
    """Its children all run, so a hook on top of that normalized the input twice, and the output
    of the last layer as well."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    before = portrait(model)
    norm = nk.BN(3)
    calls = []
    norm.register_forward_hook(lambda *_: calls.append(1))
    x = images() * 3 + 1
    expected = torch.relu(model[0](copy.deepcopy(norm)(x)))
    edit = AddInputNorm(norm)
    calls.clear()
    edit.do(model)
    torch.testing.assert_close(model(x), expected)
    assert calls == [1]
    assert [name for name, _ in model.named_children()] == ["input_norm", "0", "1"]
    edit.undo(model)
    assert portrait(model) == before


def test_parameters_that_come_with_an_edit_are_named() -> None:
    model = trained(Net())
    for edit in edits():
        before = {id(p) for p in model.parameters()}
        edit.do(model)
        come = {id(p) for p in model.parameters()} - before
        assert {id(s.new) for s in edit.successors()} == come
        edit.undo(model)
