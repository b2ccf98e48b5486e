"""normkit lab status and log: how far runs are, how they were made, and why they failed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from normkit.lab import data
from normkit.lab.experiment import Experiment
from normkit.lab.experiment.reading import parse
from normkit.lab.results import DONE, Epoch, Result
from normkit.lab.store import Store, StoredExperiment
from normkit.lab.train import Training
from normkit.lab.train.checkpoint import write

Run = Callable[..., Any]
TEXT = """
baseline = "bn"
seeds = 2
[data]
name = "synthetic:1x8x8x3x64"
[train]
epochs = 4
batch = 16
lr = 0.05
[[variants]]
name = "bn"
[[variants]]
name = "gn [x]"
norm = "gn"
options = { groups = 4 }
"""


@pytest.fixture(autouse=True)
def small(nets: Path) -> Experiment:
    (nets / "small.toml").write_text(TEXT, encoding="utf-8")
    experiment = parse(TEXT, "small")
    with Store("results/small.sqlite") as store:
        store.add(experiment.runs())
        store.remember(StoredExperiment.of(experiment, TEXT))
    return experiment


def result(run: str, accuracy: float, one_class: float = 0.5) -> Result:
    epoch = Epoch(4, train_loss=1.0, test_accuracy=accuracy, test_one_class=one_class)
    return Result(
        run,
        DONE,
        (4,),
        (epoch,),
        1.0,
        10,
        environment={"torch": "2.99", "device": "a GPU"},
        provenance={"command": "normkit lab run small.toml"},
        classes=3,
        test_samples=64,
    )


def test_status_after_ctrl_c_says_how_far_each_run_is(normkit: Run, small: Experiment) -> None:
    """Runs that had been left waited, it said, as if they had never been begun."""
    first, second, *_ = small.runs()
    training = Training(first, data.load(first.setting.data, "cpu"))
    while training.epoch < 2 or training.at < 3:
        training.step()
    with Store("results/small.sqlite") as store:
        store.folder.mkdir()
        write(training.state_dict(), store.checkpoint(first.id))
        store.checkpoint(second.id).write_bytes(b"damaged")
        ran = normkit("lab", "status", "small.toml", "--json", "facts.json")
    assert ran.status == 0, ran.err
    assert "Begun, to go on from a checkpoint" in ran.out
    assert re.search(r"bn, seed 1 +2 of 4 epochs, 3 steps of the next", ran.out)
    begun = json.loads(Path("facts.json").read_text())["begun"]
    assert begun == {"bn, seed 1": "2 of 4 epochs, 3 steps of the next"}


def test_status_counts_collapses_and_leaves_them_out_of_the_mean(
    normkit: Run, small: Experiment
) -> None:
    bn = [run for run in small.runs() if run.setting == small.variants[0].setting]
    with Store("results/small.sqlite") as store:
        store.finish(result(bn[0].id, 0.9))
        store.finish(result(bn[1].id, 0.34, one_class=1.0))
    ran = normkit("lab", "status", "small.toml")
    assert re.search(r"variant +done +collapsed +waiting +mean", ran.out)
    assert re.search(r"bn +2/2 +1 +90\.00%", ran.out)


def test_log_of_a_failed_run(normkit: Run, small: Experiment) -> None:
    failed = small.runs()[1]
    with Store("results/small.sqlite") as store:
        store.fail(failed.id, "ValueError: odd", "Traceback …\n  [bold]line 3\nValueError: odd\n")
    assert "normkit lab log RUN" in normkit("lab", "status", "small.toml").out
    for name in ("gn [x], seed 1", "gn [x],1", failed.id[:8], failed.id):
        ran = normkit("lab", "log", name)
        assert ran.status == 0, ran.err
        assert "gn [x], seed 1: failed: ValueError: odd" in ran.out
        assert "  [bold]line 3\n" in ran.out
    assert normkit("lab", "log", "gn [x], seed 1", "--file", "small.toml").status == 0


def test_log_of_a_run_that_is_done(normkit: Run, small: Experiment) -> None:
    run = small.runs()[0]
    with Store("results/small.sqlite") as store:
        store.finish(result(run.id, 0.9))
    ran = normkit("lab", "log", "bn, seed 1", "--json", "run.json")
    assert "bn, seed 1: accuracy 90.00%" in ran.out
    assert re.search(r"command +normkit lab run small.toml", ran.out)
    assert re.search(r"device +a GPU", ran.out)
    facts = json.loads(Path("run.json").read_text())
    assert facts["result"]["provenance"]["command"] == "normkit lab run small.toml"


def test_log_of_a_run_that_is_not_clear(normkit: Run) -> None:
    ran = normkit("lab", "log", "bn")
    assert ran.status == 2
    assert "'bn' may mean 2 runs" in ran.err
    assert "bn, seed 2" in ran.err
    assert "There is no run 'bn, seed 7'" in normkit("lab", "log", "bn, seed 7").err


def test_log_where_nothing_was_run(normkit: Run) -> None:
    Path("results/small.sqlite").unlink()
    assert "There is no store in results/" in normkit("lab", "log", "abcd").err


def test_report_of_a_store_in_a_folder_that_is_read_only(
    normkit: Run, small: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(path: Path) -> None:
        if path.parent.name == "results":
            raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("normkit.commands.lab_actions.check_writable", check)
    ran = normkit("lab", "report", "small.toml")
    assert ran.status == 0, ran.err
    assert f"Report: {Path('small.html').resolve()}" in ran.out
    assert not Path("results/small.html").exists()
