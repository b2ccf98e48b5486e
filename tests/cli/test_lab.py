"""normkit lab and normkit demo: what they print, write and return."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import normkit
from forked import CAN_FORK
from lab.sweep.nursery import Forked
from normkit.commands import lab_actions
from normkit.commands.lab_progress import Bars
from normkit.errors import OptionError
from normkit.lab.experiment import Experiment
from normkit.lab.experiment.reading import parse
from normkit.lab.results import DIVERGED, DONE, Epoch, Result
from normkit.lab.store import Owner, Store
from normkit.lab.sweep import SweepPlan, run_labels
from normkit.lab.sweep.messages import Progressed
from normkit.models import MissingExtra

Run = Callable[..., Any]
TEXT = """
title = "Small [thing]"
baseline = "bn"
seeds = 2
[data]
name = "synthetic:1x8x8x3x64"
[train]
epochs = 1
batch = 32
lr = 0.05
[[variants]]
name = "bn"
[[variants]]
name = "gn [x]"
norm = "gn"
options = { groups = 4 }
[scales.long]
seeds = 3
"""


@pytest.fixture(autouse=True)
def small(nets: Path) -> Experiment:
    (nets / "small.toml").write_text(TEXT, encoding="utf-8")
    return parse(TEXT, "small")


def fill(experiment: Experiment, path: Path = Path("results/small.sqlite")) -> None:
    """A store with a result for every run, as if it had been trained."""
    with Store(path) as store:
        store.add(experiment.runs())
        for i, run in enumerate(experiment.runs()):
            epoch = Epoch(1, train_loss=1.0, test_accuracy=0.5 + i / 100, test_loss=1.0, seconds=1)
            store.finish(Result(run.id, DONE, (1,), (epoch,), 1.0, 10))


class Trained:
    """Stands for the sweep: keeps what it was called with, and fills the store."""

    def __init__(self) -> None:
        self.options: dict[str, Any] = {}

    def __call__(self, experiments: list[Experiment], store: Store, **options: Any) -> list[Result]:
        self.options = options
        for experiment in experiments:
            fill(experiment, store.path)
        return list(store.results().values())


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Trained:
    made = Trained()
    monkeypatch.setattr(lab_actions.sweep, "run", made)
    return made


def test_results_as_json(normkit: Run, trained: Trained) -> None:
    """No action of the lab could tell another program what it had found."""
    ran = normkit("lab", "run", "small.toml", "--json", "-")
    assert ran.status == 0, ran.err
    facts = json.loads(ran.out)
    assert (facts["done"], facts["failed"]) == (4, {})
    assert [each["variant"] for each in facts["comparisons"]] == ["gn [x]"]
    assert len(json.loads(normkit("lab", "export", "small.toml", "--json", "-").out)) == 4
    variants = json.loads(normkit("lab", "status", "small.toml", "--json", "-").out)["variants"]
    assert [each["done"] for each in variants] == ["2/2", "2/2"]
    assert json.loads(normkit("lab", "report", "small.toml", "--json", "-").out) == facts
    stores = json.loads(normkit("lab", "status", "--json", "-").out)
    assert [each["runs"] for each in stores] == ["4 of 4 runs done"]
    ran = normkit("lab", "run", "small.toml", "--json", "-", "--no-report")
    assert json.loads(ran.out) == {**facts, "comparisons": []}


def test_from_a_file_to_a_report(
    normkit: Run, small: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers of the usual kind has test_a_machine_with_torch_alone."""
    if CAN_FORK:
        monkeypatch.setattr(lab_actions.sweep, "run", partial(lab_actions.sweep.run, start=Forked))
    ran = normkit("lab", "run", "small.toml", "--device", "cpu", "--workers", "2")
    assert ran.status == 0, ran.err
    assert "4 runs; 2 at once" in ran.err
    assert re.search(r"gn \[x\], seed 2: (accuracy|collapsed)", ran.err)
    assert re.search(r"gn \[x\] .*(better|worse|equivalent|not shown|unstable|collapsed)", ran.out)
    page = Path("results/small.html").resolve()
    assert f"Report: {page}" in ran.out
    assert "gn [x]" in page.read_text(encoding="utf-8")
    assert sorted(file.name for file in page.parent.iterdir()) == ["small.html", "small.sqlite"]
    again = normkit("lab", "resume", "small.toml", "--no-report")  # the same, by its other name
    assert (again.status, again.out, again.err) == (0, "", "")


def test_options_reach_the_sweep(normkit: Run, trained: Trained) -> None:
    ran = normkit(
        *("lab", "run", "small.toml", "--seeds", "3", "--workers", "5", "--device", "cuda:1"),
        *("--engine", "ray", "--store", "elsewhere/my.sqlite", "--no-report"),
        *("--together", "2", "--minutes", "1.5"),
    )
    assert ran.status == 0, ran.err
    del trained.options["progress"]
    assert trained.options == {
        "workers": 5, "device": "cuda:1", "engine": "ray", "together": 2, "seconds": 90.0
    }  # fmt: skip
    with Store("elsewhere/my.sqlite") as store:
        assert len(store.results()) == 6
    assert not Path("results").exists()


def test_several_experiments_in_one_go(normkit: Run, nets: Path, trained: Trained) -> None:
    (nets / "other.toml").write_text(TEXT.replace("epochs = 1", "epochs = 2"), encoding="utf-8")
    both = ("lab", "run", "small.toml", "other.toml", "--json", "-")
    ran = normkit(*both, "--store", "both.sqlite")
    assert ran.status == 0, ran.err
    assert [each["done"] for each in json.loads(ran.out)] == [4, 4]
    assert {file.name for file in nets.glob("*.html")} == {"small.html", "other.html"}
    assert "4 of 4" in normkit("lab", "status", "other.toml", "--store", "both.sqlite").out
    refused = normkit(*both)
    assert (refused.status, "--store FILE" in refused.err) == (2, True)
    refused = normkit(*both, "--store", "both.sqlite", "--track", "tensorboard")
    assert (refused.status, "--track is for one" in refused.err) == (2, True)
    assert normkit("lab", "run", "small.toml", "--minutes", "0").status == 2


def test_what_was_checked_before(
    normkit: Run, trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*given: Any) -> Any:
        raise OptionError("checked")

    monkeypatch.setattr(lab_actions.checks, "check", refused)
    assert normkit("lab", "run", "small.toml", "--no-report").status == 2
    assert normkit("lab", "run", "small.toml", "--no-report", "--no-check").status == 0


def test_the_time_is_over(normkit: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(experiments: list[Experiment], store: Store, **options: Any) -> list[Result]:
        store.add(experiments[0].runs())
        return []

    monkeypatch.setattr(lab_actions.sweep, "run", late)
    assert normkit("lab", "run", "small.toml", "--minutes", "1").status == 3


def test_scales_have_pages_of_their_own_and_share_a_store(normkit: Run, trained: Trained) -> None:
    assert normkit("lab", "run", "small.toml", "--scale", "long").status == 0
    assert {file.name for file in Path("results").iterdir()} == {"small.sqlite", "small-long.html"}
    ran = normkit("lab", "run", "small.toml", "--scale", "lnog")
    assert ran.status == 2
    assert "long" in ran.err


@pytest.mark.parametrize("seeds", ["0", "x", "1,1", "-3"])
def test_seeds_that_are_none(normkit: Run, trained: Trained, seeds: str) -> None:
    ran = normkit("lab", "run", "small.toml", f"--seeds={seeds}")
    assert ran.status == 2
    assert "seeds" in ran.err
    assert not Path("results").exists()


MISTAKES = {
    "unknown key": ("epochs = 1", "epoch = 1", "unknown key 'epoch' in train"),
    "data that is nowhere": ('"synthetic:1x8x8x3x64"', '"cifar10"', "cifar10"),
    "unknown data": ('"synthetic:1x8x8x3x64"', '"cifar11"', "cifar10"),
    "groups that do not divide": ("groups = 4", "groups = 7", "groups"),
    "unknown norm": ('norm = "gn"', 'norm = "gnn"', "gn"),
    "no seeds": ("seeds = 2", "seeds = 0", "seeds"),
    "equal variants": ('norm = "gn"\noptions = { groups = 4 }', "", "gn [x]"),
    "no such model": ("[train]", '[model]\nname = "native:smal_cnn"\n[train]', "small_cnn"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("action", ["run", "check"])
def test_mistakes_are_told_before_anything_trains(
    normkit: Run, trained: Trained, monkeypatch: pytest.MonkeyPatch, mistake: str, action: str
) -> None:
    monkeypatch.delenv("NORMKIT_DATA", raising=False)
    before, after, told = MISTAKES[mistake]
    assert before in TEXT
    Path("small.toml").write_text(TEXT.replace(before, after, 1), encoding="utf-8")
    ran = normkit("lab", action, "small.toml")
    assert ran.status == 2, ran.out
    assert told in ran.err
    assert trained.options == {}
    assert not Path("results").exists()


def test_what_is_done_needs_no_data_any_more(normkit: Run, small: Experiment) -> None:
    text = TEXT.replace("synthetic:1x8x8x3x64", "cifar10")
    Path("small.toml").write_text(text, encoding="utf-8")
    fill(parse(text, "small"))
    assert normkit("lab", "run", "small.toml").status == 0


def test_a_store_of_a_newer_version(normkit: Run, trained: Trained, small: Experiment) -> None:
    fill(small)
    base = sqlite3.connect("results/small.sqlite")
    base.execute("UPDATE meta SET value = '99'")
    base.commit()
    base.close()
    for action in ("run", "status", "report", "export"):
        ran = normkit("lab", action, "small.toml")
        assert ran.status == 2
        assert "newer normkit: it is a store of version 99" in ran.err
    assert trained.options == {}


def test_failed_runs_are_named(
    normkit: Run, small: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(experiments: list[Experiment], store: Store, **options: Any) -> list[Result]:
        runs = experiments[0].runs()
        store.add(runs)
        store.fail(runs[1].id, "memory [ran] out")
        return []

    monkeypatch.setattr(lab_actions.sweep, "run", fails)
    ran = normkit("lab", "run", "small.toml")
    assert ran.status == 1
    assert "1 of 4 runs failed:\n  gn [x], seed 1: memory [ran] out" in ran.err
    assert "memory [ran] out" in Path("results/small.html").read_text(encoding="utf-8")
    ran = normkit("lab", "status", "small.toml")
    assert "0 of 4 runs done, 3 waiting, 1 failed" in ran.out
    assert "memory [ran] out" in ran.out


def test_training_needs_no_extras(
    normkit: Run, trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without(*given: Any) -> Any:
        raise MissingExtra("The statistics need scipy. Try: pip install 'normkit[lab]'")

    monkeypatch.setattr(lab_actions, "compare", without)
    ran = normkit("lab", "run", "small.toml")
    assert ran.status == 0
    assert f"4 results are in {Path('results/small.sqlite')}. The statistics need scipy" in ran.err


WITHOUT_EXTRAS = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"rich", "scipy", "sklearn", "timm", "plotly", "jinja2", "ray"}:
            raise ModuleNotFoundError(f"{name} is blocked in this test", name=name)

sys.meta_path.insert(0, Blocked())
from normkit.cli import main

sys.exit(main(["lab", "run", "small.toml", "--device", "cpu", "--workers", "1", "--seeds", "1"]))
"""


def test_a_machine_with_torch_alone() -> None:
    source = str(Path(normkit.__file__).parents[1])
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT_EXTRAS],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": source},
    )
    assert ran.returncode == 0, ran.stderr
    assert "[2/2" in ran.stderr
    assert "2 results are in results/small.sqlite" in ran.stderr
    assert "pip install 'normkit[" in ran.stderr


def test_status(normkit: Run, small: Experiment) -> None:
    assert normkit("lab", "status").status == 2
    assert "no store" in normkit("lab", "status", "small.toml").err
    fill(small)
    first, second, *_ = parse(TEXT, "small", "long").runs()[-2:]
    with Store("results/small.sqlite") as store:
        store.add([first, second])
        owner = Owner(store.folder)
        store.claim(owner, [second.id])
        store.record_epochs([(second.id, Epoch(7, test_accuracy=0.625))])
        ran = normkit("lab", "status", "small.toml", "--scale", "long")
        assert ran.status == 0
        assert "Small [thing]: 4 of 6 runs done, 1 being trained, 1 waiting." in ran.out
        assert re.search(r"gn \[x\], seed 3 +7 +62.50% +process \d+ on ", ran.out)
        assert re.search(r"bn +2/3 +1 +51.00%", ran.out)
        ran = normkit("lab", "status")
        assert re.search(r"results/small.sqlite +4 of 6 runs done, .* process \d+", ran.out)
        owner.close()
    assert "4 of 6 runs done, 2 waiting" in normkit("lab", "status").out


def test_status_tells_of_results_that_are_not_asked_for(normkit: Run, small: Experiment) -> None:
    fill(small)
    assert "does not ask for" not in normkit("lab", "status", "small.toml").out
    text = Path("small.toml").read_text(encoding="utf-8").replace("lr = 0.05", "lr = 0.06")
    Path("small.toml").write_text(text, encoding="utf-8")
    ran = normkit("lab", "status", "small.toml")
    assert "0 of 4 runs done, 4 waiting" in ran.out
    assert "The store also has 4 results that this experiment does not ask for" in ran.out


def test_status_counts_divergences(normkit: Run, small: Experiment) -> None:
    with Store("results/small.sqlite") as store:
        store.add(small.runs())
        store.finish(Result(small.runs()[0].id, DIVERGED, (), (), 1.0, 10, note="in epoch 1"))
    ran = normkit("lab", "status", "small.toml")
    assert re.search(r"variant +done +diverged +waiting", ran.out)
    assert re.search(r"bn +1/2 +1 +1", ran.out)


def test_report(normkit: Run, small: Experiment) -> None:
    assert "There is no store" in normkit("lab", "report", "small.toml").err
    fill(small)
    ran = normkit("lab", "report", "small.toml", "--out", "answer.html")
    assert ran.status == 0, ran.err
    assert "Report: " in ran.out
    assert Path("answer.html").read_text(encoding="utf-8").startswith("<!")


@pytest.mark.parametrize("format", ["csv", "parquet", "latex"])
def test_export(normkit: Run, small: Experiment, format: str) -> None:
    assert "There is no store" in normkit("lab", "export", "small.toml").err
    fill(small)
    ran = normkit("lab", "export", "small.toml", "--format", format)
    assert ran.status == 0, ran.err
    ending = {"csv": ".csv", "parquet": ".parquet", "latex": ".tex"}[format]
    made = Path(f"results/small{ending}")
    assert f"Written: {made}" in ran.out
    assert b"gn [x]" in made.read_bytes() or b"gn {[}x{]}" in made.read_bytes()
    kept = Path(f"mine{ending}")
    kept.write_text("mine")
    command = ("lab", "export", "small.toml", "--format", format, "--out", str(kept))
    assert "exists already" in normkit(*command).err
    assert kept.read_text() == "mine"
    assert normkit(*command, "--force").status == 0
    assert kept.read_bytes() == made.read_bytes()


def test_export_of_every_epoch(normkit: Run, small: Experiment) -> None:
    fill(small)
    assert normkit("lab", "export", "small.toml", "--per", "epoch").status == 0
    rows = Path("results/small.csv").read_text(encoding="utf-8").splitlines()
    assert "epoch" in rows[0]
    assert len(rows) == 1 + 4


def test_check(normkit: Run) -> None:
    ran = normkit("lab", "check", "small.toml", "--scale", "long")
    assert ran.status == 0, ran.err
    assert ran.out.splitlines() == [
        "“Small [thing]” at scale long can be trained.",
        "2 variants (bn, gn [x]) × 3 seeds: 6 runs, 6 epochs. Baseline: bn.",
    ]


def test_check_reads_every_scale(normkit: Run, nets: Path) -> None:
    (nets / "small.toml").write_text(f"{TEXT}\n[scales.longer]\nsedes = 4", encoding="utf-8")
    ran = normkit("lab", "check", "small.toml")
    assert ran.status == 2
    assert "unknown key 'sedes' in scales.longer. Did you mean 'seeds'?" in ran.err
    assert normkit("lab", "check", "small.toml", "--scale", "long").status == 0


def test_another_metric_of_what_was_trained(normkit: Run, small: Experiment) -> None:
    fill(small)
    ran = normkit("lab", "report", "small.toml", "--metric", "loss")
    assert ran.status == 0, ran.err
    assert "test loss" in ran.out
    assert Path("results/small-loss.html").exists()
    assert not Path("results/small.html").exists()
    ran = normkit("lab", "report", "small.toml", "--metric", "top5_error")
    assert (ran.status, ran.err) == (
        2,
        "normkit: Epoch 1 of a run has no top5_error. Top-5 is recorded where there are more than "
        "5 classes.\n",
    )
    assert "Did you mean 'loss'?" in normkit("lab", "export", "small.toml", "--metric", "los").err


def test_shipped_experiments_are_found_by_name(
    normkit: Run, trained: Trained, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shutil.move("small.toml", tmp_path / "shipped-one.toml")
    monkeypatch.setattr(lab_actions, "shipped", lambda: {"one": tmp_path / "shipped-one.toml"})
    assert normkit("lab", "run", "one", "--no-report").status == 0
    assert Path("results/shipped-one.sqlite").exists()
    ran = normkit("lab", "run", "onee")
    assert ran.status == 2
    assert "Did you mean 'one'?" in ran.err


def test_list(normkit: Run) -> None:
    ran = normkit("lab", "list")
    if not lab_actions.shipped():
        assert ran.status == 2
        return
    assert ran.status == 0
    assert [name for name in lab_actions.shipped() if name not in ran.out] == []


def test_help_teaches(normkit: Run) -> None:
    ran = normkit("lab")
    assert ran.status == 2
    for action in ("run", "status", "report", "export", "check", "list"):
        assert f"normkit lab {action}" in ran.out or f"    {action} " in ran.out
        ran_help = normkit("lab", action, "--help")
        assert "examples:" in ran_help.out
    example = normkit("lab").out.partition("a small experiment:\n")[2].partition("\n\n")[0]
    assert len(parse(example).runs()) == 10  # what the help shows can be run


def test_bars(small: Experiment) -> None:
    file = io.StringIO()
    screen = Console(file=file, force_terminal=True, width=100, color_system=None)
    bars = Bars(screen)
    bars.end()  # a sweep with nothing to do never begins
    bars.begin(SweepPlan(run_labels(small), workers=2))
    first, second, *_ = (run.id for run in small.runs())
    bars.time.clock = lambda: 0.0
    bars.started(first)
    bars.started(second)
    bars.progressed(Progressed(second, 0.5))
    bars.progress.refresh()
    bars.time.clock = lambda: 50.0  # for half an epoch
    epoch = Epoch(1, train_loss=0.25, test_accuracy=0.5, seconds=100.0)
    bars.progressed(Progressed(second, 1.0, epoch))
    bars.progress.refresh()
    bars.failed(first, "memory [ran] out")
    bars.finished(Result(second, DIVERGED, (), (), 1.0, 10, note="in epoch 1"))
    bars.say("a [word]")
    bars.progress.refresh()
    bars.end()
    said = file.getvalue()
    assert "0 of 4 runs" in said
    assert re.search(r"gn \[x\], seed 1 +\S+ +in epoch 1\b", said)
    assert re.search(r"gn \[x\], seed 1 +\S+ epoch 1, loss 0.250, test 50.0%", said)
    assert "about 2 min 30 s left" in said  # three runs of 100 s by two workers
    assert "bn, seed 1 failed: memory [ran] out" in said
    assert "gn [x], seed 1: diverged in epoch 1" in said
    assert "a [word]" in said
    assert "2 of 4 runs" in said


def test_demo(
    normkit: Run, trained: Trained, small: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped: list[Path] = []

    def read(path: Path) -> Experiment:
        shipped.append(path)
        return small

    monkeypatch.setattr(lab_actions, "read", read)
    ran = normkit("demo")
    assert ran.status == 0, ran.err
    assert shipped[0].name == "demo.toml"
    assert "verdict" in ran.out
    assert ran.out.rstrip().splitlines()[-1].endswith("small.html")
    with Store("results/small.sqlite") as store:
        before = store.results()
    assert normkit("demo", "--fresh", "--no-report").status == 0
    with Store("results/small.sqlite") as store:
        assert store.results().keys() == before.keys()


def test_the_experiment_of_the_demo_can_be_run() -> None:
    experiment = lab_actions.demo_experiment()
    assert len(experiment.runs()) == 50  # five normalizers, two batches a worker, five seeds
    assert set(experiment.cells()) == {
        (("train.worker_batch", 2),),
        (("train.worker_batch", 64),),
    }
