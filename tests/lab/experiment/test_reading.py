"""What a good file says is what the records hold."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from normkit.lab.experiment import Data, Experiment, Model, ModelStep, Published, Train
from normkit.lab.experiment.problems import BadExperiment
from normkit.lab.experiment.reading import parse, read, scales

FILE = """
    title = "Small batches"
    question = "Does it hold?"
    source = "a paper, table 1"
    baseline = "bn"
    metric = "error"
    scale = "desk"
    seeds = 3
    equivalence = 0.01

    [data]
    name = "digits"
    validation = 0.1
    [model]
    name = "native:small_cnn"
    options = { width = 8 }
    [train]
    epochs = 6
    lr = 1
    schedule = "step"
    milestones = [2, 4]
    [watch]
    measures = ["condensation"]

    [[variants]]
    name = "bn"
    [[variants]]
    name = "bcn + ws"
    norm = "bcn"
    options = { groups = 4 }
    weights = "ws"
    weights_options = { variant = "timm" }
    train.lr = 0.5
    [[variants]]
    name = "two"
    steps = [
      { norm = "gn", where = "stem", options = { groups = 2 } },
      { recipe = "xbn", options = { position = 1 } },
    ]

    [[published]]
    variant = "bn"
    value = 24.3
    std = 0.2
    note = "ResNet-50"

    [scales.desk]
    [scales.lab]
    difference = "CIFAR-10"
    seeds = [4, 7]
    [scales.lab.data]
    name = "cifar10"
    [scales.lab.model]
    options.depth = 20
"""


def made(text: str = FILE, scale: str | None = None) -> Experiment:
    return parse(textwrap.dedent(text), "example", scale)


def test_an_experiment_holds_what_its_file_says() -> None:
    experiment = made()
    assert (experiment.name, experiment.title, experiment.scale) == (
        "example",
        "Small batches",
        "desk",
    )
    assert (experiment.baseline, experiment.metric, experiment.equivalence) == ("bn", "error", 0.01)
    assert experiment.seeds == (1, 2, 3)
    assert [variant.name for variant in experiment.variants] == ["bn", "bcn + ws", "two"]
    setting = experiment.variant("bn").setting
    assert setting.data == Data("digits", validation=0.1)
    assert setting.model == Model(options={"width": 8})
    assert setting.train == Train(epochs=6, lr=1.0, schedule="step", milestones=(2, 4))
    assert isinstance(setting.train.lr, float)
    assert setting.watch.measures == ("condensation",)
    assert setting.steps == ()


def test_norm_and_weights_are_short_for_steps() -> None:
    setting = made().variant("bcn + ws").setting
    assert setting.steps == (
        ModelStep("norm", "bcn", None, {"groups": 4}),
        ModelStep("weights", "ws", None, {"variant": "timm"}),
    )
    assert setting.train.lr == 0.5
    assert setting.train.epochs == 6


def test_steps_can_be_listed() -> None:
    assert made().variant("two").setting.steps == (
        ModelStep("norm", "gn", "stem", {"groups": 2}),
        ModelStep("recipe", "xbn", None, {"position": 1}),
    )


def test_published_numbers_of_another_metric_wait_until_it_is_asked_for() -> None:
    text = """
baseline = "bn"
metric = "error"
[[variants]]
name = "bn"
[[variants]]
name = "gn"
norm = "gn"
[[published]]
variant = "bn"
value = 24.3
[[published]]
variant = "bn"
metric = "top5_error"
value = 7.19
"""
    asked = {metric: parse(text, metric=metric) for metric in (None, "top5_error", "loss")}
    assert [each.value for each in asked[None].published] == [0.243]
    assert [each.value for each in asked["top5_error"].published] == [0.0719]
    assert asked["loss"].published == ()
    assert [each.metric for each in asked.values()] == ["error", "top5_error", "loss"]
    assert {run.id for each in asked.values() for run in each.runs()} == {
        run.id for run in asked[None].runs()
    }
    assert [asked[metric].higher_is_better for metric in asked] == [False] * 3
    assert parse(text, metric="top5_accuracy").higher_is_better


def test_published_numbers_are_in_percent_in_the_file_and_fractions_in_the_record() -> None:
    assert made().published == (Published("bn", 0.243, (), 0.002, "ResNet-50"),)
    loss = FILE.replace('metric = "error"', 'metric = "loss"')
    assert made(loss).published == (Published("bn", 24.3, (), 0.2, "ResNet-50"),)


def test_a_scale_is_laid_over_the_rest() -> None:
    lab = made(scale="lab")
    assert lab.seeds == (4, 7)
    assert lab.difference == "CIFAR-10"
    setting = lab.variant("bn").setting
    assert setting.data == Data("cifar10", validation=0.1)
    assert setting.model.options == {"width": 8, "depth": 20}
    assert made().variant("bn").setting.model.options == {"width": 8}


def test_lists_of_a_scale_replace_those_of_the_file() -> None:
    text = FILE + '[[scales.lab.variants]]\nname = "bn"\n[[scales.lab.variants]]\nname = "gn"\n'
    text += 'norm = "gn"\n'
    assert [v.name for v in made(text.replace("\n    ", "\n"), "lab").variants] == ["bn", "gn"]


def test_none_takes_a_value_back() -> None:
    text = """
        baseline = "bn"
        [train]
        worker_batch = 4
        [[variants]]
        name = "bn"
        [[variants]]
        name = "whole batches"
        train.worker_batch = "none"
        [[variants]]
        name = "ubn"
        norm = "ubn"
        options = { max_samples = "none" }
    """
    experiment = made(text)
    assert experiment.variant("bn").setting.train.worker_batch == 4
    assert experiment.variant("whole batches").setting.train.worker_batch is None
    assert experiment.variant("ubn").setting.steps[0].options == {"max_samples": None}


def test_a_file_is_read_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "small-batches.toml"
    path.write_text(textwrap.dedent(FILE), encoding="utf-8")
    experiment = read(path)
    assert (experiment.name, experiment.path) == ("small-batches", path)
    assert scales(path) == ["desk", "lab"]


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "marked.toml"
    path.write_text(textwrap.dedent(FILE), encoding="utf-8-sig")
    assert read(path).title == "Small batches"


def test_a_missing_file_suggests_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "ubn-table-3.toml").write_text("", encoding="utf-8")
    with pytest.raises(BadExperiment, match=r"ubn-table-4\.toml.*Did you mean 'ubn-table-3'"):
        read(tmp_path / "ubn-table-4.toml")


def test_a_file_without_scales_needs_none() -> None:
    text = 'baseline = "a"\n[[variants]]\nname = "a"\n[[variants]]\nname = "b"\nnorm = "gn"\n'
    experiment = parse(text)
    assert (experiment.scale, experiment.title, experiment.seeds) == ("", "experiment", (1,))


def test_looks_and_multiplicity() -> None:
    plain, asked = parse(GOOD), parse(f'looks = [5, 10]\nmultiplicity = "none"\n{GOOD}')
    assert (plain.looks, plain.multiplicity) == ((), "holm")
    assert (asked.looks, asked.multiplicity) == ((5, 10), "none")
    assert [run.id for run in asked.runs()] == [run.id for run in plain.runs()]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("looks = [10, 5]", "looks expects numbers of seeds from 2 up, in order"),
        ("looks = [1, 5]", "looks expects numbers of seeds from 2 up"),
        ("looks = 5", "looks expects numbers of seeds from 2 up"),
        ("seeds = 6\nlooks = [2, 5]", "looks end at 5 seeds, and the file asks for 6"),
        ('multiplicity = "bonferroni"', "multiplicity is 'bonferroni'"),
        ('losses = "ignore"', "losses is 'ignore'"),
    ],
)
def test_rules_that_cannot_be(line: str, said: str) -> None:
    with pytest.raises(BadExperiment, match=re.escape(said)):
        parse(f"{line}\n{GOOD}")


GOOD = """
baseline = "bn"
[[variants]]
name = "bn"
[[variants]]
name = "gn"
norm = "gn"
"""
