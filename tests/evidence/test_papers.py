"""Every table and figure of the five papers is accounted for, and the README says so truly."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from normkit.lab.experiment.reading import read, scales
from tools.evidence.papers import ITEMS, PAPERS, Paper, PaperItem, counts

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "experiments").glob("*.toml"))


@pytest.mark.parametrize("paper", PAPERS, ids=lambda paper: paper.key)
def test_every_number_occurs_once(paper: Paper) -> None:
    for kind, many in (("table", paper.tables), ("figure", paper.figures)):
        mine = [item for item in ITEMS if (item.paper, item.kind) == (paper.key, kind)]
        assert [n for item in mine for n in item.numbers] == list(range(1, many + 1))


def test_an_item_has_an_experiment_or_a_reason() -> None:
    for item in ITEMS:
        assert bool(item.experiment) != bool(item.reason), item


def test_the_experiments_are_those_that_the_list_names() -> None:
    """Not a file that the list forgot, and not a name without a file."""
    assert {item.experiment for item in ITEMS if item.experiment} == {file.stem for file in FILES}


@pytest.mark.parametrize("item", [i for i in ITEMS if i.experiment], ids=lambda item: item.label)
def test_an_experiment_says_which_table_or_figure_it_is(item: PaperItem) -> None:
    source = read(ROOT / "experiments" / f"{item.experiment}.toml").source
    kind, *numbers = re.findall(r"tables?|figures?|\d+", source.partition("), ")[2])
    if item.experiment.startswith(f"{item.paper}-{item.kind}"):
        assert kind.rstrip("s") == item.kind
        assert [int(number) for number in (numbers[0], numbers[-1])] == [
            item.numbers[0],
            item.numbers[-1],
        ]


def test_what_the_readme_says_about_coverage() -> None:
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    said = re.search(r"(\d+) of the (\d+) tables and figures of the five papers", text)
    assert said is not None
    total, measured, _ = counts()
    assert [int(number) for number in said.groups()] == [measured, total]


# what a file does beyond the paper's text stands on its page: the key, its value, and the words
DISCLOSED = [
    ("estimation-shift", "worker_batch", 128, "those of 128 images"),
    ("revisiting-bn", "floor", 1e-8, "ends at 1e-8"),
]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_what_the_papers_do_not_print_is_said(file: Path) -> None:
    for scale in scales(file):
        experiment = read(file, scale)
        for paper, key, value, words in DISCLOSED:
            trains = {getattr(each.setting.train, key) for each in experiment.variants}
            if file.stem.startswith(paper) and value in trains:
                assert words in experiment.difference, (scale, key)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_no_variant_starts_with_another_network_than_its_rivals(file: Path) -> None:
    """bcn alone started with zero scales in ws-bcn-table-6, and nothing said so."""
    for scale in scales(file):
        experiment = read(file, scale)
        for cell in experiment.cells():
            here = [each for each in experiment.variants if each.cell == cell]
            starts = {str(each.setting.model.options.get("zero_init_residual")) for each in here}
            assert len(starts) == 1, scale


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_published_numbers_stand_at_the_papers_scale_alone(file: Path) -> None:
    document = tomllib.loads(file.read_text(encoding="utf-8"))
    assert [name for name, scale in document["scales"].items() if "published" in scale] in (
        [],
        ["paper"],
    )
