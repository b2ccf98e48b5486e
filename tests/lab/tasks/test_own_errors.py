"""What goes wrong in the author's own code is told with its file and line."""

from __future__ import annotations

from pathlib import Path

import pytest

from normkit.errors import NormkitError
from normkit.lab.experiment import Experiment
from normkit.lab.experiment.checks import check
from normkit.lab.experiment.problems import BadExperiment
from normkit.lab.experiment.reading import read
from normkit.lab.train import train

TOP = """
baseline = "torch"
data = "synthetic:1x8x8x3x40"
model = "native:small_cnn"
[[variants]]
name = "torch"
[[variants]]
name = "gn"
norm = "gn"
[train]
epochs = 1
batch = 16
"""

BAD = """
import math
import sys
import torch
from torch.nn import functional as F
from normkit.lab.tasks import Evaluation, Task, TaskMetric

def vector(output, target):
    return F.cross_entropy(output, target, reduction="none")

def text(output, target):
    return "a loss"

def nothing(output, target):
    F.cross_entropy(output, target)

def number(output, target):
    return 3

def detached(output, target):
    return F.cross_entropy(output, target).detach()

def leaves(output, target):
    sys.exit(3)

class Judged(Task):
    metrics = {"score": TaskMetric()}

    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

class Unjudged(Judged):
    def evaluation(self, part):
        return None

class Empty(Evaluation):
    def add(self, model, batch):
        pass

    def values(self):
        return None

class Silent(Judged):
    def evaluation(self, part):
        return Empty()
"""


def line_of(name: str) -> int:
    """Where a function or class of the author's file stands."""
    starts = (f"def {name}(", f"class {name}(")
    return next(i for i, x in enumerate(BAD.splitlines(), 1) if x.strip().startswith(starts))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "bad.py").write_text(BAD)
    return tmp_path


def experiment(folder: Path, more: str = "", top: str = "") -> Experiment:
    (folder / "mine.toml").write_text(top + TOP + more)
    return read(folder / "mine.toml")


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("vector", r"a tensor \(4,\), expected one number.*Try \.mean\(\)"),
        ("text", "'a loss', of type str, expected one number"),
        ("nothing", "None, expected one number.*Try to return the loss"),
        ("number", "3, of type int, expected one number"),
        ("detached", r"a tensor \(\) without a gradient, expected.*without \.item\(\)"),
    ],
)
def test_a_loss_that_is_not_one_number_is_named(folder: Path, name: str, what: str) -> None:
    """The message was of Classification.loss, which the author has not written."""
    with pytest.raises(
        BadExperiment, match=rf"bad\.py:{name} \(bad\.py:{line_of(name)}\) gave {what}"
    ):
        check(experiment(folder, f'loss = "bad.py:{name}"\n'))


def test_own_code_that_exits_is_an_error_of_that_code(folder: Path) -> None:
    """sys.exit(3) in a loss ended the command with status 3 and not a word."""
    made = experiment(folder, 'loss = "bad.py:leaves"\n')
    place = rf"bad\.py:{line_of('leaves') + 1}, in leaves"
    with pytest.raises(BadExperiment, match=rf"failed: SystemExit: 3 \({place}\)"):
        check(made)
    with pytest.raises(NormkitError, match=place):
        train(made.runs()[0])
    (folder / "bad.py").write_text("import sys\nsys.exit(4)\n")
    with pytest.raises(BadExperiment, match=r"could not be imported: SystemExit: 4 \(bad\.py:2"):
        read(folder / "mine.toml")


@pytest.mark.parametrize(
    ("task", "place", "what"),
    [
        ("Unjudged", 1, r"gave None, without add and values\. Expected an object with add"),
        ("Silent", 1, r"values\(\) gave None, expected numbers by name, such as \{'score': 0\.5\}"),
    ],
)
def test_an_evaluation_that_is_none_is_named(
    folder: Path, task: str, place: int, what: str
) -> None:
    """It was: 'NoneType' object has no attribute 'add'."""
    made = experiment(folder, top=f'task = "bad.py:{task}"\n')
    named = rf"{task}\.evaluation \(bad\.py:{line_of(task) + place}\):? {what}"
    with pytest.raises(BadExperiment, match=named):
        check(made)
    with pytest.raises(NormkitError, match=named):
        train(made.runs()[0])


@pytest.mark.parametrize(
    ("more", "key", "line"),
    [
        ('loss = "bad.py:vectr"\n', "train.loss", 13),
        ('[metrics.mine]\nuse = "bad.py:vectr"\n', "metrics.mine.use", 14),
    ],
)
def test_a_misspelt_name_is_told_with_its_key(folder: Path, more: str, key: str, line: int) -> None:
    """It was said of task.name, which the file does not even have."""
    told = rf"mine, line {line}: {key} cannot be used: bad\.py has no 'vectr'.*'vector'"
    with pytest.raises(BadExperiment, match=told):
        experiment(folder, more)
