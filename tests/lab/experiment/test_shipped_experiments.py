"""The experiments that are shipped: each can be read, built and compared at each of its scales."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from importlib.resources import as_file, files
from pathlib import Path

import pytest

from normkit.lab import data
from normkit.lab.experiment.checks import check_models, different_ground
from normkit.lab.experiment.reading import read, scales

FOLDER = Path(__file__).parents[3] / "experiments"
FILES = sorted(FOLDER.glob("*.toml"))
CASES = [(file, scale) for file in FILES for scale in scales(file)]
IDS = [f"{file.stem}, {scale}" for file, scale in CASES]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_file_has_the_published_protocol_one_for_hours_and_a_choice(file: Path) -> None:
    document = tomllib.loads(file.read_text(encoding="utf-8"))
    assert {"paper", "lab"} <= set(scales(file))
    assert document["scale"] in scales(file)


@pytest.mark.parametrize(("file", "scale"), CASES, ids=IDS)
def test_an_experiment_at_one_of_its_scales(file: Path, scale: str) -> None:
    experiment = read(file, scale)
    # it says what it asks, where that comes from and what differs
    assert experiment.question.endswith("?")
    assert experiment.title != experiment.name
    assert experiment.source
    assert len(experiment.difference) > 20
    runs = experiment.runs()
    assert runs
    assert len({run.id for run in runs}) == len(runs)
    # what is compared is never the same thing twice, and on the same ground
    for cell in experiment.cells():
        here = [variant for variant in experiment.variants if variant.cell == cell]
        ids = {run.id for variant in here for run in variant.runs(experiment.seeds)}
        assert len(ids) == len(here) * len(experiment.seeds)
    assert different_ground(experiment) == []
    for variant in experiment.variants:  # its data can be asked for
        data.check(variant.setting.data)
        known = variant.setting.data.name.partition(":")[0]
        assert known in data.names()
    for published in experiment.published:  # belongs to a variant and is a share
        assert experiment.variant(published.variant, published.cell).name == published.variant
        assert experiment.metric == "loss" or 0 < published.value < 1


TABLES = [file for file in FILES if "-table-" in file.stem]


@pytest.mark.parametrize("file", TABLES, ids=lambda file: file.stem)
def test_a_table_brings_its_published_numbers(file: Path) -> None:
    assert read(file, "paper").published


TOP_5 = {
    "ubn-table-2": ("top5_accuracy", "bn", 0.8994),
    "ubn-table-3": ("top5_accuracy", "in", 0.9420),
    "ubn-table-4": ("top5_accuracy", "bn", 0.9985),
    "ws-bcn-table-2": ("top5_error", "bn", 0.0719),
    "ws-bcn-table-5": ("top5_error", "gn", 0.0727),
    "ws-bcn-table-6": ("top5_error", "gn", 0.0746),
}


@pytest.mark.parametrize("name", TOP_5)
def test_tables_with_top_5_bring_it(name: str) -> None:
    metric, variant, value = TOP_5[name]
    file = FOLDER / f"{name}.toml"
    five, one = read(file, "paper", metric).published, read(file, "paper").published
    assert (five[0].variant, five[0].value) == (variant, value)
    better = 1 if metric == "top5_accuracy" else -1
    known = {(each.variant, each.cell): each.value for each in one}
    assert all(better * (each.value - known[each.variant, each.cell]) > 0 for each in five)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_small_scales_take_small_data(file: Path) -> None:
    """What runs in minutes or hours must not ask for a data set that few people have."""
    small = {"digits", "mnist", "fashion-mnist", "cifar10", "cifar100", "camvid"}
    small |= {"bccd", "mnist-usps", "moving-digits", "nuclei", "omniglot-small", "pacs"}
    for scale in set(scales(file)) - {"paper"}:
        names = {variant.setting.data.name for variant in read(file, scale).variants}
        assert names <= small
        if scale == "desk":
            assert not any(name.startswith("cifar") for name in names)


DESKS = [file for file, scale in CASES if scale == "desk"]


@pytest.mark.parametrize("half", [0, 1])
def test_their_models_can_be_built_at_a_desk(half: int) -> None:
    """All files as one experiment, for many ask for the same models: each is tried once."""
    read_all = [read(file, "desk") for file in DESKS]
    variants = [
        replace(variant, name=f"{each.name}: {variant.name}")
        for each in read_all
        for variant in each.variants
        if (variant.setting.model.name == "native:small_cnn") == half
    ]
    check_models(replace(read_all[0], variants=tuple(variants)))


def test_the_demonstration_compares_five_normalizers_at_two_batch_sizes() -> None:
    with as_file(files("normkit.lab") / "demo.toml") as file:
        demo = read(file)
    assert len({variant.name for variant in demo.variants}) == 5
    assert [dict(cell)["train.worker_batch"] for cell in demo.cells()] == [64, 2]
    assert demo.seeds == (1, 2, 3, 4, 5)
    assert len(demo.runs()) == 50
    check_models(demo)
