"""The experiment on the page about experiments is one."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from normkit.lab.experiment.checks import check_models
from normkit.lab.experiment.reading import parse

PAGE = Path(__file__).parents[3] / "docs" / "experiments.md"
TEXT = re.findall(r"```toml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[0]


@pytest.mark.parametrize("scale", ["quick", "long"])
def test_it_reads_and_its_models_build(scale: str) -> None:
    experiment = parse(TEXT, scale=scale)
    assert {variant.setting.train.worker_batch for variant in experiment.variants} == {2, 64}
    assert len(experiment.variants) == 8
    check_models(experiment)


def test_its_published_numbers_can_be_added() -> None:
    page = PAGE.read_text(encoding="utf-8")
    (said,) = re.findall(r"say another one:\n\n(      \[\[published\]\].*?)\n- ", page, re.DOTALL)
    text = f"{TEXT}\n{textwrap.dedent(said)}"
    assert [each.value for each in parse(text).published] == [0.665]
    assert len(parse(text, metric="top5_accuracy").published) == 2


def test_its_grid_over_networks_can_be_read() -> None:
    page = PAGE.read_text(encoding="utf-8")
    (said,) = re.findall(r"not further variants:\n\n(.*?)\n- ", page, re.DOTALL)
    text = f'baseline = "bn"\n{textwrap.dedent(said)}\n'
    variants = '[[variants]]\nname = "bn"\n[[variants]]\nname = "gn"\nnorm = "gn"'
    found = parse(text + variants).variants
    rates = {variant.setting.model.name: variant.setting.train.lr for variant in found}
    assert rates == {"torchvision:resnet18": 0.1, "torchvision:resnet50": 0.05}
