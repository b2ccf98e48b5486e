"""--set: as if it had been written in the file, with mistakes told like those of the file."""

from __future__ import annotations

import pytest

from normkit.errors import OptionError
from normkit.lab.experiment.overrides import Overrides
from normkit.lab.experiment.problems import BadExperiment
from normkit.lab.experiment.reading import parse

TEXT = """
baseline = "bn"
seeds = 2
[train]
lr = 0.1
epochs = 3
[[variants]]
name = "bn"
[[variants]]
name = "gn"
norm = "gn"
train.momentum = 0.8
[[published]]
variant = "bn"
value = 90.0
[scales.long.train]
epochs = 30
"""


def ids(text: str, *overrides: str, scale: str | None = None) -> list[str]:
    return [run.id for run in parse(text, scale=scale, overrides=overrides).runs()]


def test_a_run_is_known_as_if_the_file_had_said_it() -> None:
    assert ids(TEXT, "train.lr=0.05") == ids(TEXT.replace("lr = 0.1", "lr = 0.05"))
    assert ids(TEXT, "train.lr = 0.05") != ids(TEXT)
    assert ids(TEXT, "train.lr=0.1") == ids(TEXT)
    assert ids(TEXT, "train.batch=64", "train.lr=1") == ids(
        TEXT.replace("lr = 0.1", "lr = 1.0\nbatch = 64")
    )


def test_it_counts_more_than_a_scale_and_the_last_one_most() -> None:
    read = parse(TEXT, scale="long", overrides=["train.epochs=5", "train.epochs=7"])
    assert {variant.setting.train.epochs for variant in read.variants} == {7}
    assert read.overrides == ("train.epochs=5", "train.epochs=7")


@pytest.mark.parametrize(
    ("given", "value"),
    [
        ('model.name="native:small_cnn"', "native:small_cnn"),
        ("model.name=native:small_cnn", "native:small_cnn"),
        ("model.options={width=8}", {"width": 8}),
        ("model.options.width=8", {"width": 8}),
    ],
)
def test_values_are_those_of_toml_and_words_need_no_quotes(given: str, value: object) -> None:
    model = parse(TEXT, overrides=[given]).variants[0].setting.model
    assert value in (model.name, dict(model.options))


def test_lists_truth_values_and_keys_of_the_experiment() -> None:
    read = parse(TEXT, overrides=["seeds=[4,5]", 'watch.measures=["esm"]', "data.flip=true"])
    assert read.seeds == (4, 5)
    assert read.variants[0].setting.watch.measures == ("esm",)
    assert read.variants[0].setting.data.flip is True


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("train.lr=fast", "--set train.lr=fast: train.lr expects a finite number, got 'fast'"),
        ("train.learning_rate=1", "--set train.learning_rate=1: unknown key 'learning_rate'"),
        ("data.flip=True", "data.flip expects true or false, got 'True'"),
        ("trian.lr=1", "--set trian.lr=1: unknown key 'trian'. Did you mean 'train'?"),
        ("seeds=0", "--set seeds=0: seeds expects a number"),
    ],
)
def test_mistakes_are_told_with_what_was_typed(given: str, said: str) -> None:
    with pytest.raises(BadExperiment) as raised:
        parse(TEXT, "mine", overrides=[given])
    assert said in str(raised.value)
    assert "line" not in str(raised.value)


@pytest.mark.parametrize("given", ["train.lr", "=3", "train.lr=[1,", "", "scale=long"])
def test_what_is_no_key_with_a_value(given: str) -> None:
    with pytest.raises(OptionError, match="--set got"):
        parse(TEXT, overrides=[given])


def test_a_value_that_nothing_is_trained_with_is_refused() -> None:
    """The grid has its own learning rates: --set train.lr=0.5 would change nothing in silence."""
    grid = TEXT + '[grid]\n"train.lr" = [0.1, 0.2]\n'
    with pytest.raises(BadExperiment, match=r"train\.lr has no effect: the grid"):
        parse(grid, overrides=["train.lr=0.5"])
    changed = parse(grid, overrides=['grid."train.lr"=[0.5]'])
    assert {variant.setting.train.lr for variant in changed.variants} == {0.5}


def test_published_numbers_are_not_of_a_setting_that_was_changed() -> None:
    assert parse(TEXT).published
    assert parse(TEXT, overrides=["seeds=5"]).published
    assert not parse(TEXT, overrides=["train.lr=0.05"]).published


def test_variants_are_not_set_one_by_one() -> None:
    """It said that variants were missing, and not what can be set."""
    with pytest.raises(OptionError, match=r"--set got 'variants.gn.*changed in the file.*train"):
        Overrides(["variants.gn.norm=bn"])
