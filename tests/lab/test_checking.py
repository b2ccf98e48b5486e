"""What cannot be trained is told before anything trains."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from normkit.lab import data
from normkit.lab.checking import check, check_data, check_models, expected
from normkit.lab.experiment import Data, Experiment
from normkit.lab.problems import BadExperiment
from normkit.lab.reading import parse

FILE = """
baseline = "bn"
[data]
name = "digits"
[[variants]]
name = "bn"
[[variants]]
name = "gn"
norm = "gn"
"""


def made(addition: str = "", *, data: str = 'name = "digits"', model: str = "") -> Experiment:
    text = FILE.replace('name = "digits"', data)
    return parse(f"{text}{addition}\n[model]\n{model}", "file")


def complaint(experiment: Experiment) -> str:
    with pytest.raises(BadExperiment) as error:
        check(experiment)
    return str(error.value)


def test_a_good_experiment_passes() -> None:
    check(made('weights = "ws"'))


@pytest.mark.parametrize(
    ("addition", "said"),
    [
        ("options = { groups = 5 }", "variant 'gn' cannot be trained: conv1.norm: GN expects"),
        ('where = "layer4"', "where='layer4' fits none of the 3 norms"),
        ("options = { groups = -1 }", "expects groups to be a positive integer, got -1"),
    ],
)
def test_models_that_cannot_be_converted(addition: str, said: str) -> None:
    assert said in complaint(made(addition))


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ('name = "native:smal_cnn"', "Did you mean 'small_cnn'?"),
        ("options = { widht = 3 }", "native:small_cnn has no option 'widht'. Did you mean 'width'"),
        ('name = "torch.nn:Flatten"', "expected a tensor (4, 10)"),
        ('name = "nowhere.nets:small"', "nowhere.nets:small was not found"),
    ],
)
def test_models_that_cannot_be_built_or_run(model: str, said: str) -> None:
    text = FILE.replace('norm = "gn"', "train.lr = 0.2")  # nothing to convert
    assert said in complaint(parse(f"{text}[model]\n{model}", "file"))


def too_large() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(100, 10))


def test_a_model_for_other_images_is_told_by_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn, "too_large_for_digits", too_large, raising=False)
    text = FILE.replace('norm = "gn"', "train.lr = 0.2")
    said = complaint(parse(f'{text}[model]\nname = "torch.nn:too_large_for_digits"', "file"))
    assert "does not take 4 images of 1×8×8: RuntimeError: " in said


def test_every_problem_is_told_with_its_cell() -> None:
    grid = '\n[grid]\n"norm.groups" = [4, 5, 7]'
    said = complaint(made(grid))
    assert "file has 2 problems" in said
    assert "'gn' at norm.groups = 5 cannot be trained" in said
    assert "'gn' at norm.groups = 7 cannot be trained" in said


def test_equal_models_are_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    monkeypatch.setattr("normkit.lab.checking.try_model", tried.append)
    check_models(made('\n[grid]\n"train.lr" = [0.1, 0.2, 0.3]'))
    assert len(tried) == 2


def test_missing_data_is_told_with_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NORMKIT_DATA", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadExperiment, match=r"variant 'bn' has no data: .*cifar"):
        check_data(made(data='name = "cifar10"'))
    with pytest.raises(BadExperiment, match="there is no data set 'cifar11'"):
        check_data(made(data='name = "cifar11"'))


def test_models_can_be_checked_where_the_data_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NORMKIT_DATA", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    check_models(made(data='name = "cifar10"'))


@pytest.mark.parametrize("name", ["digits", "synthetic:3x6x5x4x40"])
def test_expected_shapes_are_those_of_the_data(name: str) -> None:
    sets = data.load(Data(name))
    assert expected(Data(name)) == (sets.classes, sets.shape)


def test_every_data_set_with_a_name_has_a_shape() -> None:
    for name in set(data.names()) - {"folder", "synthetic"}:
        classes, shape = expected(Data(name))
        assert classes >= 10
        assert len(shape) == 3


def test_nothing_random_is_drawn_from_the_generator_of_others() -> None:
    before = torch.get_rng_state()
    check_models(made())
    assert torch.equal(torch.get_rng_state(), before)
