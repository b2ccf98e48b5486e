"""The grid: cells, what changes along its axes, and variants that live in some cells only."""

from __future__ import annotations

import pytest

from normkit.lab.experiment import Experiment
from normkit.lab.experiment.problems import BadExperiment
from normkit.lab.experiment.reading import parse

VARIANTS = """
[[variants]]
name = "bn"
norm = "bn"
[[variants]]
name = "gn"
norm = "gn"
"""


def made(grid: str, more: str = "", variants: str = VARIANTS) -> Experiment:
    return parse(f'baseline = "bn"\n{grid}\n{variants}\n{more}')


def test_every_variant_stands_in_every_cell_the_last_axis_fastest() -> None:
    experiment = made('[grid]\n"train.worker_batch" = [2, 64]\ndata.name = ["digits", "mnist"]')
    assert experiment.cells() == [
        (("train.worker_batch", batch), ("data.name", name))
        for batch in (2, 64)
        for name in ("digits", "mnist")
    ]
    assert len(experiment.variants) == 8
    setting = experiment.variant("gn", experiment.cells()[1]).setting
    assert (setting.train.worker_batch, setting.data.name) == (2, "mnist")


def test_whole_numbers_on_an_axis_of_fractions_are_fractions() -> None:
    experiment = made('[grid]\n"train.lr" = [1, 0.1]')
    assert experiment.cells() == [(("train.lr", 1.0),), (("train.lr", 0.1),)]


def test_options_of_the_model_and_of_norms_can_be_axes() -> None:
    experiment = made('[grid]\n"model.options.depth" = [20, 56]\n"norm.groups" = [4, 8]')
    by_cell = {variant.cell: variant.setting for variant in experiment.variants[1::2]}
    setting = by_cell[(("model.options.depth", 56), ("norm.groups", 4))]
    assert setting.model.options == {"depth": 56}
    assert setting.steps[0].options == {"groups": 4}


def test_a_variant_without_the_option_is_the_same_in_all_its_cells_and_trained_once() -> None:
    experiment = made('[grid]\n"norm.groups" = [4, 8]')
    assert [v.setting.steps[0].options for v in experiment.variants if v.name == "bn"] == [{}, {}]
    assert len(experiment.runs()) == 3


GRID = """
[grid]
"train.worker_batch" = [2, 64]
[along."train.worker_batch"]
"train.lr" = [0.01, 0.1]
"""


def test_other_keys_change_along_an_axis() -> None:
    experiment = made(GRID)
    assert experiment.cells() == [(("train.worker_batch", 2),), (("train.worker_batch", 64),)]
    assert [v.setting.train.lr for v in experiment.variants] == [0.01, 0.01, 0.1, 0.1]


def test_a_variant_has_its_own_along_and_a_word_can_be_an_axis() -> None:
    variants = VARIANTS.replace(
        'norm = "gn"',
        'norm = "gn"\nalong.batch = { "train.batch" = [1, 32], "norm.groups" = [2, 4] }',
    )
    grid = '[grid]\nbatch = ["micro", "large"]\n[along.batch]\n"train.batch" = [128, 128]'
    experiment = made(grid, variants=variants)
    batches = [(v.name, dict(v.cell)["batch"], v.setting.train.batch) for v in experiment.variants]
    assert batches == [
        ("bn", "micro", 128),
        ("gn", "micro", 1),
        ("bn", "large", 128),
        ("gn", "large", 32),
    ]
    assert [v.setting.steps[0].options for v in experiment.variants if v.name == "gn"] == [
        {"groups": 2},
        {"groups": 4},
    ]


def test_only_keeps_a_variant_out_of_cells() -> None:
    variants = VARIANTS + 'only = { "train.worker_batch" = [2] }\n'
    experiment = made('[grid]\n"train.worker_batch" = [2, 64]', variants=variants)
    assert [(v.name, v.cell[0][1]) for v in experiment.variants] == [
        ("bn", 2),
        ("gn", 2),
        ("bn", 64),
    ]


def test_published_numbers_find_their_cells() -> None:
    more = """
[[published]]
variant = "bn"
cell = { "train.worker_batch" = 64 }
value = 76.832
[[published]]
variant = "gn"
along = "train.worker_batch"
values = { 2 = 75.872, 64 = 76.544 }
"""
    found = made(GRID, more).published
    assert [(p.variant, p.cell, p.value) for p in found] == [
        ("bn", (("train.worker_batch", 64),), 0.76832),
        ("gn", (("train.worker_batch", 2),), 0.75872),
        ("gn", (("train.worker_batch", 64),), 0.76544),
    ]


def test_published_numbers_of_another_scale_are_left_out() -> None:
    more = """
[[published]]
variant = "bn"
cell = { "train.worker_batch" = 128 }
value = 70
[scales.paper.grid]
"train.worker_batch" = [128]
[scales.paper.along."train.worker_batch"]
"train.lr" = [0.4]
"""
    assert made(GRID, more).published == ()
    paper = parse(f'baseline = "bn"\n{GRID}{VARIANTS}{more}', scale="paper")
    assert [p.value for p in paper.published] == [0.7]


def test_published_numbers_appear_only_at_the_scale_they_were_measured_at() -> None:
    """Numbers of ImageNet stood beside ours of digits, and "agreed"."""
    more = """
[[published]]
variant = "bn"
cell = { "train.worker_batch" = 2 }
value = 70
[scales.desk.train]
epochs = 2
"""
    text = f'baseline = "bn"\n{GRID}{VARIANTS}{more}'
    with_paper = f"{text}[scales.paper.train]\nepochs = 90\n"
    assert len(parse(with_paper, scale="paper").published) == 1
    assert parse(with_paper, scale="desk").published == ()
    assert parse(with_paper).published == ()
    assert len(parse(text, scale="desk").published) == 1  # a file without it decides itself


@pytest.mark.parametrize(
    ("grid", "said"),
    [
        ('"train.batchsize" = [2]', "is not a key of train. Did you mean 'batch'?"),
        ('"train.lr" = []', "has no values"),
        ('"train.lr" = [1, 1.0]', "has a value twice"),
        ('"train.lr" = 0.1', "expects a list of values, got 0.1"),
        ('"train.epochs" = [1.5]', "expects an integer, got 1.5"),
        ('"model.options" = [{ depth = 3 }]', "such as model.options.x"),
        ('word = ["a", "b"]', "nothing changes along it"),
        ('"norm.group" = [2]', "is an option of no norm here. Did you mean 'groups'?"),
        ('"weights.eps" = [1e-5]', "There is no weights to have options"),
        ('"train.lr" = [0.0, 0.1]', 'grid."train.lr" expects more than 0, got 0.0'),
    ],
)
def test_axes_that_cannot_be(grid: str, said: str) -> None:
    with pytest.raises(BadExperiment, match="line 3") as error:
        made(f"[grid]\n{grid}")
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("along", "said"),
    [
        ('"train.lr"."train.batch" = [2, 3]', "lies along no axis"),
        ('"train.worker_batch"."train.lr" = [0.1]', "expects 2 values, one for each of [2, 64]"),
        ('"train.worker_batch"."trian.lr" = [0.1, 1]', "is not a key. Did you mean 'train'?"),
        ('"train.worker_batch"."train.lr" = ["a", "b"]', "expects a finite number, got 'a'"),
    ],
)
def test_changes_that_cannot_be(along: str, said: str) -> None:
    with pytest.raises(BadExperiment, match="line 5") as error:
        made(f'[grid]\n"train.worker_batch" = [2, 64]\n[along]\n{along}')
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("addition", "said"),
    [
        ("train.worker_batch = 2", "train.worker_batch changes along the grid as well"),
        ("train.lr = 2", "train.lr changes along the grid as well"),
        ("along.x.y = [1, 2]", "lies along no axis"),
        ('only = { "train.lr" = [1] }', "is not an axis of the grid"),
        ('only = { "train.worker_batch" = [3] }', "leaves nothing: the axis has [2, 64]"),
    ],
)
def test_variants_that_contradict_the_grid(addition: str, said: str) -> None:
    with pytest.raises(BadExperiment) as error:
        made(GRID, variants=VARIANTS + addition)
    assert said in str(error.value)


def test_two_axes_cannot_set_one_key() -> None:
    grid = GRID.replace("[along.", '"data.name" = ["digits", "mnist"]\n[along.')
    with pytest.raises(BadExperiment, match="changes along"):
        made(grid + '[along."data.name"]\n"train.lr" = [1, 2]')
    with pytest.raises(BadExperiment, match="is an axis of the grid itself"):
        made(grid + '"data.name" = ["digits", "mnist"]')
