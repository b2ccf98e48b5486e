"""What cannot be trained is told before anything trains."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from normkit.lab import data
from normkit.lab.experiment import Data, Experiment
from normkit.lab.experiment.checks import check, check_data, check_models
from normkit.lab.experiment.problems import BadExperiment
from normkit.lab.experiment.reading import parse
from normkit.lab.experiment.records import OWN_DATA

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
        ("options = { groups = 5 }", "variant 'gn' cannot be trained: groups=5 does not divide"),
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


def into(tried: list[Any]) -> Callable[[Any], list[str]]:
    """A trial that only notes what is tried, and has no caution."""

    def note(setting: Any) -> list[str]:
        tried.append(setting)
        return []

    return note


def test_equal_models_are_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Any] = []
    monkeypatch.setattr("normkit.lab.experiment.checks.try_model", into(tried))
    check_models(made('\n[grid]\n"train.lr" = [0.1, 0.2, 0.3]'))
    assert len(tried) == 2


@pytest.mark.parametrize(
    ("variant", "many"),
    [
        ('recipe = "bgn"', 3),  # its groups follow from the number of images
        ('recipe = "bgn"\nrecipe_options = { groups = 4 }', 1),
        ('norm = "dn"\noptions = { batch = 2 }', 3),  # links samples, which must fit
    ],
)
def test_models_that_depend_on_the_batch_are_tried_for_each(
    monkeypatch: pytest.MonkeyPatch, variant: str, many: int
) -> None:
    tried: list[Any] = []
    monkeypatch.setattr("normkit.lab.experiment.checks.try_model", into(tried))
    text = FILE.replace('norm = "gn"', variant)
    check_models(parse(f'{text}\n[grid]\n"train.worker_batch" = [8, 16, 64]', "file"))
    assert len(tried) == 1 + many


def test_large_images_are_tried_two_at_a_time_whatever_the_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[Any] = []
    monkeypatch.setattr("normkit.lab.experiment.checks.try_model", into(tried))
    grid = '\n[train]\ndrop_last = true\n[grid]\n"train.worker_batch" = [2, 4, 128]'
    check_models(made(grid, data='name = "imagenet"'))
    assert len(tried) == 2
    check_models(made(grid, data='name = "cifar10"'))  # four of these, so that two are another case
    assert len(tried) == 2 + 4


FLAT = """
[model]
name = "native:mlp"
[train]
batch = 4
"""


def test_a_last_batch_of_one_is_told_before_an_epoch_is_trained() -> None:
    """Batch norms of 1×1 maps cannot do with one sample: it came out at the end of an epoch."""
    text = FILE.replace('norm = "gn"', 'norm = "bn"\ntrain.drop_last = true') + FLAT
    said = complaint(parse(text, "file"))  # 1,437 = 359 · 4 + 1
    assert "variant 'bn' cannot be trained: the last batch of an epoch has 1 of 1,437" in said
    assert said.endswith("Try train.drop_last = true.")
    assert "'gn'" not in said
    check(parse(text.replace("batch = 4", "batch = 8"), "file"))


def test_a_last_worker_with_one_sample_is_told_too() -> None:
    text = FILE + FLAT.replace("batch = 4", "batch = 64\nworker_batch = 4")
    assert "has 29 of 1,437 training samples, and a worker has 1 of them" in complaint(
        parse(text, "file")
    )


def test_a_last_batch_that_dn_cannot_link_is_told_too() -> None:
    text = FILE.replace('norm = "gn"', 'norm = "dn"\noptions = { batch = 2 }')
    said = complaint(parse(text + "[train]\nbatch = 64", "file"))
    assert "the last batch of an epoch has 29 of 1,437 training samples: " in said
    check(parse(text + "[train]\nbatch = 64\ndrop_last = true", "file"))


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("[train]\nbatch = 2000\ndrop_last = true", "nothing would be trained"),
        ("[data]\nsubset = 1500", "subset=1500, but digits has 1437 samples to train on"),
        ("[data]\nvalidation = 0.0001", "Try a larger share"),
    ],
)
def test_samples_that_are_not_there_are_told_before_anything_trains(asked: str, said: str) -> None:
    text = FILE.replace('[data]\nname = "digits"\n', "") if "[data]" in asked else FILE
    assert said in complaint(parse(f"{text}\n{asked}", "file"))


@pytest.mark.parametrize("name", ["digits", "synthetic:3x6x5x4x43"])
@pytest.mark.parametrize("train", ["train", "test"])
@pytest.mark.parametrize(("validation", "subset"), [(0.0, None), (0.1, None), (0.25, 5)])
def test_samples_are_counted_as_they_are_loaded(
    name: str, train: str, validation: float, subset: int | None
) -> None:
    spec = Data(name, train=train, validation=validation, subset=subset)
    assert data.training_samples(spec) == len(data.load(spec).train)


def test_top_5_of_few_classes_is_no_metric() -> None:
    text = FILE.replace("digits", "synthetic:1x8x8x5x100")
    said = complaint(parse(text, "file", metric="top5_error"))
    assert said == (
        "file: variant 'bn' cannot be judged: metric is 'top5_error', and there are 5 classes. "
        "Try accuracy or error."
    )
    check(parse(text, "file", metric="error"))
    check(parse(FILE, "file", metric="top5_error"))


def test_whoever_waits_is_told_what_is_tried() -> None:
    heard: list[str] = []
    check(made('\n[grid]\n"train.lr" = [0.1, 0.2]'), heard.append)
    assert heard == [
        "Looking for the data",
        "Trying model 1 of 2: 'bn' at train.lr = 0.1",
        "Trying model 2 of 2: 'gn' at train.lr = 0.1",
    ]


def test_missing_data_is_told_with_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NORMKIT_DATA", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadExperiment, match=r"variant 'bn' cannot be trained on its data: .*cifar"):
        check_data(made(data='name = "cifar10"'))


def test_models_can_be_checked_where_the_data_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NORMKIT_DATA", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    check_models(made(data='name = "cifar10"'))


@pytest.mark.parametrize("name", ["digits", "synthetic:3x6x5x4x40"])
def test_expected_shapes_are_those_of_the_data(name: str) -> None:
    sets = data.load(Data(name))
    assert data.classes_and_shape(Data(name)) == (sets.classes, sets.shape)


def test_every_data_set_with_a_name_has_a_shape() -> None:
    for name in set(data.names()) - {*OWN_DATA, "synthetic"}:
        classes, shape = data.classes_and_shape(Data(name))
        assert classes >= 1
        assert len(shape) == 3


def test_nothing_random_is_drawn_from_the_generator_of_others() -> None:
    before = torch.get_rng_state()
    check_models(made())
    assert torch.equal(torch.get_rng_state(), before)


def test_own_choices_are_tried_with_any_number_of_classes() -> None:
    """The drawn images of a trial were too few for the ten classes of digits: all was refused."""
    for name in ("digits", "synthetic:3x64x64x200x1000", "synthetic:1x8x8x3x30"):
        check(made('[train]\nschedule = "one_cycle"', data=f'name = "{name}"\nvalidation = 0.2'))
