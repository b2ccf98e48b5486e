"""normkit lab new and normkit lab diff."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from normkit.commands import lab_new
from normkit.errors import NormkitError
from normkit.lab.experiment.reading import parse, read
from normkit.lab.results import DONE, Epoch, Result
from normkit.lab.store import Store, StoredExperiment

Run = Callable[..., Any]


@pytest.fixture(autouse=True)
def folder(nets: Path) -> Path:
    return nets


def test_a_new_file_passes_the_check(normkit: Run) -> None:
    ran = normkit("lab", "new", "mine.toml", "--yes", "--seeds", "2", "--norms", "gn,bcn")
    assert ran.status == 0, ran.err
    assert "normkit lab run mine.toml" in ran.out
    checked = normkit("lab", "check", "mine.toml")
    assert checked.status == 0, checked.err
    assert "3 variants (as it is, gn, bcn) × 2 seeds: 6 runs" in checked.out
    assert "--force" in normkit("lab", "new", "mine.toml", "--yes").err


def test_without_a_terminal_nothing_is_asked(normkit: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda text: pytest.fail(f"asked {text}"))
    assert normkit("lab", "new", "mine.toml").status == 0
    assert len(read("mine.toml").runs()) == 10


def test_a_new_file_can_be_run(normkit: Run) -> None:
    made = normkit(
        "lab", "new", "mine.toml", "--yes", "--data", "synthetic:1x8x8x3x64", "--batch", "16",
        "--model", "native:small_cnn", "--epochs", "1", "--seeds", "1",
    )  # fmt: skip
    assert made.status == 0, made.err
    ran = normkit("lab", "run", "mine.toml", "--no-report", "--device", "cpu", "--workers", "1")
    assert ran.status == 0, ran.err
    assert "2 runs; 1 at once" in ran.err


def test_questions_are_asked_again_until_the_answer_fits(capsys: Any) -> None:
    typed = iter(['My "question"', "folder", "my photos", "", "gm", "gn", "many", "3", "", ""])
    answers = lab_new.gather({}, lambda text: next(typed))
    said = capsys.readouterr().err
    assert "'gm'" in said
    assert "got 'many'" in said
    assert answers["norms"] == ("gn",)
    assert answers["epochs"] == 3
    experiment = parse(lab_new.file_text(answers), "mine")
    setting = experiment.variants[0].setting
    assert experiment.title == 'My "question"'
    assert (setting.data.path, setting.model.name) == ("my photos", "torchvision:resnet18")
    assert setting.train.epochs == 3


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (("--norms", "gm"), "gm"),
        (("--norms", "gn,gn"), "each once"),
        (("--model", "native:smal_cnn"), "smal_cnn"),
        (("--epochs", "0"), "from 1 up"),
    ],
)
def test_what_is_wrong_is_told_and_nothing_is_written(
    normkit: Run, option: tuple[str, str], said: str
) -> None:
    ran = normkit("lab", "new", "mine.toml", "--yes", *option)
    if option[0] == "--model" and ran.status == 0:  # told by lab check, which builds it
        ran = normkit("lab", "check", "mine.toml")
    else:
        assert not Path("mine.toml").exists()
    assert ran.status == 2
    assert said in ran.err


def test_the_ending_of_a_new_file(normkit: Run) -> None:
    assert "expected .toml" in normkit("lab", "new", "mine.txt", "--yes").err
    with pytest.raises(NormkitError):
        lab_new.gather({"norms": ""}, None)


# ---------------------------------------------------------------- diff

TEXT = """
baseline = "bn"
seeds = 2
[train]
epochs = 2
lr = 0.1
[[variants]]
name = "bn"
[[variants]]
name = "gn"
norm = "gn"
[scales.long.train]
epochs = 4
"""
OTHER = TEXT.replace("lr = 0.1", "lr = 0.05").replace(
    'norm = "gn"', 'norm = "gn"\noptions = { groups = 4 }'
)


def fill(name: str, text: str, accuracy: float) -> None:
    experiment = parse(text, name)
    with Store(f"results/{name}.sqlite") as store:
        store.add(experiment.runs())
        store.remember(StoredExperiment.of(experiment, text))
        for i, run in enumerate(experiment.runs()):
            epoch = Epoch(1, test_accuracy=accuracy + i / 100)
            store.finish(Result(run.id, DONE, (1,), (epoch,), 1.0, 10))


def test_two_files_with_their_results(normkit: Run) -> None:
    Path("one.toml").write_text(TEXT)
    Path("two.toml").write_text(OTHER + '[[variants]]\nname = "ln"\nnorm = "ln"\n')
    fill("one", TEXT, 0.5)
    fill("two", OTHER, 0.6)
    ran = normkit("lab", "diff", "one.toml", "two.toml", "--json", "facts.json")
    assert ran.status == 0, ran.err
    assert re.search(r"all +train.lr +0\.1 +0\.05", ran.out)
    assert re.search(r"gn +steps +norm gn +norm gn \(options=groups=4\)", ran.out)
    assert "Only in two: ln." in ran.out
    assert re.search(r"bn +51\.00 ± 1\.41 \(2\) +61\.00 ± 1\.41 \(2\) +\+10\.00", ran.out)
    facts = json.loads(Path("facts.json").read_text())
    assert facts["results"][0]["difference"] == pytest.approx(0.1)


def test_a_store_and_the_file_as_it_is_now(normkit: Run) -> None:
    fill("one", TEXT, 0.5)
    Path("one.toml").write_text(TEXT.replace("momentum", "").replace("lr = 0.1", "lr = 0.2"))
    ran = normkit("lab", "diff", "results/one.sqlite", "one.toml")
    assert ran.status == 0, ran.err
    assert re.search(r"variant +key +A +B", ran.out)
    assert re.search(r"all +train.lr +0\.1 +0\.2", ran.out)
    assert "51.00 ± 1.41 (2)" in ran.out


def test_scales_of_one_file_and_the_same_twice(normkit: Run) -> None:
    Path("one.toml").write_text(TEXT)
    ran = normkit("lab", "diff", "one.toml", "one.toml@long")
    assert re.search(r"all +train.epochs +2 +4", ran.out)
    assert "Neither has results yet." in ran.out
    assert "No setting differs." in normkit("lab", "diff", "one.toml", "one.toml").out


def test_what_cannot_be_compared(normkit: Run) -> None:
    fill("one", TEXT, 0.5)
    assert "There is no store" in normkit("lab", "diff", "no.sqlite", "no.sqlite").err
    one = "results/one.sqlite"
    assert "has no scale 'lang'" in normkit("lab", "diff", one, f"{one}@lang").err
