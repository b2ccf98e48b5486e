"""The experiment on the page about experiments is one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from normkit.lab.checking import check_models
from normkit.lab.reading import parse

PAGE = Path(__file__).parents[2] / "docs" / "experiments.md"
(TEXT,) = re.findall(r"```toml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("scale", ["quick", "long"])
def test_it_reads_and_its_models_build(scale: str) -> None:
    experiment = parse(TEXT, scale=scale)
    assert {variant.setting.train.worker_batch for variant in experiment.variants} == {2, 64}
    assert len(experiment.variants) == 8
    check_models(experiment)
