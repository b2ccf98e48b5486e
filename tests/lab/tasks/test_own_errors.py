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
epochs = 3
batch = 8
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

def not_a_number(output, target):
    return F.cross_entropy(output, target) * math.nan

def nan_metric(output, target):
    return math.nan

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

class Nowhere(Empty):
    def values(self):
        return {"score": math.nan}

class Lost(Judged):
    def evaluation(self, part):
        return Nowhere()

class Numbered(torch.utils.data.Dataset):
    def __init__(self, samples, wrong=-1):
        self.samples, self.wrong = samples, wrong

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        return torch.randn(1, 8, 8), 7 if index == self.wrong else index % 3

def data(wrong=-1, batches=False):
    train = Numbered(40, wrong)
    if batches:
        train = torch.utils.data.DataLoader(train, 10)
    return {"train": train, "test": Numbered(8), "classes": 3}
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


def test_a_loss_that_is_nan_is_told_by_the_check(folder: Path) -> None:
    """The check made a step with it, and said that the experiment can be trained."""
    made = experiment(folder, 'loss = "bad.py:not_a_number"\n')
    place = rf"\(bad\.py:{line_of('not_a_number')}\)"
    with pytest.raises(BadExperiment, match=rf"the loss {place} of the first step is nan"):
        check(made)
    result = train(made.runs()[0])
    assert result is not None
    assert result.note.endswith(f"(bad.py:{line_of('not_a_number')}).")


METRIC = '[metrics.mine]\nuse = "bad.py:nan_metric"\nhigher_is_better = true\n'


@pytest.mark.parametrize(
    ("top", "more", "metric", "line"),
    [("", METRIC, "mine", "nan_metric"), ('task = "bad.py:Lost"\n', "", "score", "Lost")],
)
def test_a_metric_that_is_nan_is_no_divergence(
    folder: Path, top: str, more: str, metric: str, line: str
) -> None:
    """All runs were called diverged, though the loss was finite; nobody said that a metric is."""
    made = experiment(folder, "lr = 0.05\n" + more, top)
    place = f"metric {metric} (bad.py:{line_of(line) + (line == 'Lost')})"
    (caution,) = check(made)
    assert caution.startswith(f"{place} is NaN on a batch of the test set")
    with pytest.raises(NormkitError) as caught:
        train(made.runs()[0])
    assert str(caught.value).startswith(f"{place} was NaN in every evaluation")


@pytest.mark.parametrize(
    ("options", "more", "named"),
    [
        ("wrong = 23", "", r"train: sample 23 of Numbered \(bad\.py:{line}\)"),
        (
            "wrong = 23",
            "subset = 30\nsplit_seed = 1\n",
            r"train: sample 23 of Numbered \(bad\.py:{line}\)",
        ),
        ("wrong = 23, batches = true", "", "train: batch 3, sample 3"),
    ],
)
def test_a_label_that_is_no_class_is_told_with_its_sample(
    folder: Path, options: str, more: str, named: str
) -> None:
    """It was torch's own: IndexError: Target 7 is out of bounds."""
    table = f'[data]\nname = "bad.py:data"\noptions = {{ {options} }}\n{more}'
    (folder / "mine.toml").write_text(TOP.replace('data = "synthetic:1x8x8x3x40"\n', "") + table)
    named = named.format(line=line_of("Numbered"))
    with pytest.raises(NormkitError, match=named + " has the label 7, expected 0 to 2"):
        train(read(folder / "mine.toml").runs()[0])


@pytest.mark.parametrize(
    ("text", "what"),
    [("path,label,split\n", "has no images"), ("path,label\nbad.py,1\n", "has no column 'split'")],
)
def test_a_csv_without_images_is_told_with_the_experiment(
    folder: Path, text: str, what: str
) -> None:
    """It was: "the column split has , expected train and test", and of no experiment."""
    (folder / "list.csv").write_text(text)
    table = f'[data]\nname = "csv"\npath = "{folder / "list.csv"}"\n'
    (folder / "mine.toml").write_text(TOP.replace('data = "synthetic:1x8x8x3x40"\n', "") + table)
    with pytest.raises(
        BadExperiment,
        match=rf"mine: variant 'torch' cannot be trained on its data: .*list\.csv {what}",
    ):
        check(read(folder / "mine.toml"))


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
