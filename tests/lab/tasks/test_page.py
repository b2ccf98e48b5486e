"""The files that docs/experiments.md shows are an author's folder that works."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from normkit.lab.experiment.checks import check
from normkit.lab.experiment.reading import read
from normkit.lab.results import DONE
from normkit.lab.statistics import compare
from normkit.lab.store import FAILED, Store
from normkit.lab.sweep import run
from normkit.lab.train import train

PAGE = Path(__file__).parents[3] / "docs" / "experiments.md"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    page = PAGE.read_text(encoding="utf-8")
    files = re.findall(r"```(?:python|toml)\n# (\S+\.(?:py|toml))\n(.*?)```", page, re.DOTALL)
    assert [name for name, _ in files] == ["mytask.py", "contrast.toml", "mydata.py", "shades.toml"]
    for name, text in files:
        (tmp_path / name).write_text(text)
    return tmp_path


def test_a_task_in_a_sweep_where_one_variant_fails(folder: Path) -> None:
    """Other runs go on, and what failed is told by file and line."""
    check(read(folder / "contrast.toml"))  # as the page shows it, with the ten classes of digits
    few = 'data = { name = "digits", subset = 160 }'
    text = (folder / "contrast.toml").read_text().replace('data = "digits"', few)
    assert few in text
    text += '[[variants]]\nname = "loud"\nnorm = "gn"\ntask.options = { noise = "much" }\n'
    (folder / "contrast.toml").write_text(text)
    experiment = read(folder / "contrast.toml")
    with Store(folder / "results.sqlite") as store:
        run(experiment, store, workers=1, device="cpu")
        states = store.status()
        results = store.results()
    failed = experiment.variant("loud").runs(experiment.seeds)[0].id
    assert states[failed].state == FAILED
    assert re.search(r"Contrastive\.step failed \(mytask\.py:\d+, in", states[failed].reason)
    assert len(results) == 2
    for each in results.values():
        assert each.outcome("matched") == DONE
        assert each.score("matched") > 0.1


def test_data_loss_metric_optimizer_and_schedule(folder: Path) -> None:
    pytest.importorskip("torchmetrics")
    pytest.importorskip("torchvision")
    experiment = read(folder / "shades.toml")
    check(experiment)
    results = {each.id: train(each) for each in experiment.runs()}
    found = {run: result for run, result in results.items() if result is not None}
    for each in found.values():
        assert each.outcome("r2") == DONE
        assert each.score("r2") > 0
        assert 0 <= each.score("far_off") < 1
        assert each.epochs[-1].metrics["validation_r2"] > 0
    assert len(list(compare(experiment, found))) == 1
