"""Data, loss and metrics of one's own, with the tasks of the lab."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch

from normkit.errors import NormkitError
from normkit.lab.experiment import Run
from normkit.lab.experiment.checks import check
from normkit.lab.experiment.problems import BadExperiment
from normkit.lab.experiment.reading import read
from normkit.lab.tasks import load_sets
from normkit.lab.train import Training, train
from tests.lab.train.stand_ins import numbers

DATA = """
import torch
from torch.utils.data import Dataset


class Blobs(Dataset):
    def __init__(self, samples, seed):
        drawn = torch.Generator().manual_seed(seed)
        self.targets = torch.arange(samples) % 3
        self.images = torch.randn(samples, 1, 8, 8, generator=drawn)
        self.images += 2 * self.targets[:, None, None, None]

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        return self.images[index], self.targets[index]


class Sizes(Blobs):
    def __getitem__(self, index):
        image, target = super().__getitem__(index)
        return image, 0.5 * target.float()


def make(samples=40):
    return {"train": Blobs(samples, 1), "test": Blobs(12, 2)}


def sizes():
    return {"train": Sizes(40, 1), "test": Sizes(12, 2), "classes": 1}


def batches():
    from torch.utils.data import DataLoader

    return DataLoader(Blobs(40, 1), 10, shuffle=True), DataLoader(Blobs(12, 2), 6)


def listed():
    train, test = batches()
    return {"train": list(train), "test": list(test), "classes": 3, "shape": (1, 8, 8)}


def softer(output, target, power=2):
    return (1 - output.softmax(1).gather(1, target[:, None])).pow(power).mean()


def share_of_zeros(output, target):
    return (output.argmax(1) == 0).double().mean()
"""

TOP = """
baseline = "torch"
data = "mydata.py:make"
model = "native:small_cnn"
[[variants]]
name = "torch"
[[variants]]
name = "gn"
norm = "gn"
[train]
epochs = 2
batch = 10
lr = 0.05
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mydata.py").write_text(dedent(DATA))
    return tmp_path


def runs(folder: Path, text: str = TOP) -> list[Run]:
    (folder / "mine.toml").write_text(text)
    return read(folder / "mine.toml").runs()


def whole(run: Run) -> Any:
    result = train(run)
    assert result is not None
    return result


def resumed(run: Run, steps: int) -> Any:
    sets = load_sets(run.setting)
    half, rest = Training(run, sets), Training(run, sets)
    for _ in range(steps):
        half.step()
    rest.load_state_dict(half.state_dict())
    while rest.step():
        pass
    return rest.result()


def test_a_data_set_of_ones_own_is_trained_on(folder: Path) -> None:
    text = TOP + '[data]\nname = "mydata.py:make"\noptions = { samples = 30 }\nvalidation = 0.2\n'
    run = runs(folder, text.replace('data = "mydata.py:make"\n', ""))[0]
    sets = load_sets(run.setting)
    sizes = [len(part) for part in (sets.train, sets.validation, sets.test) if part]
    assert (sizes, sets.classes, sets.shape) == ([24, 6, 12], 3, (1, 8, 8))
    result = whole(run)
    assert result.epochs[-1].validation_accuracy is not None
    assert result.epochs[-1].test_accuracy > 0.5


def test_augmentation_is_paired_and_goes_on_where_it_was(folder: Path) -> None:
    pytest.importorskip("torchvision")
    augment = (
        'data.augment = [{ use = "RandomHorizontalFlip" }, '
        '{ use = "RandomCrop", size = 8, padding = 1 }]\n'
    )
    text = augment + TOP.replace('data = "', 'data.name = "')
    first, second = runs(folder, text)
    sets = load_sets(first.setting)

    def seen(seed: int, epoch: int, start: int = 0) -> list[torch.Tensor]:
        given = sets.train.batches(
            10, seed=seed, epoch=epoch, shuffle=True, augment=True, start=start
        )
        return [images for images, _ in given]

    assert all(map(torch.equal, seen(1, 0), seen(1, 0)))
    assert all(map(torch.equal, seen(1, 0, start=2), seen(1, 0)[2:]))
    plain = [images for images, _ in sets.train.batches(10, seed=1, epoch=0, shuffle=True)]
    assert not torch.equal(seen(1, 0)[0], plain[0])
    assert numbers(resumed(first, 6)).epochs == numbers(whole(first)).epochs
    assert first.id != second.id


def test_a_list_of_batches_is_no_list_of_samples(folder: Path) -> None:
    """It was taken as a Dataset, and batches of batches did not fit the network."""
    run = runs(folder, TOP.replace("mydata.py:make", "mydata.py:listed"))[0]
    training = Training(run, load_sets(run.setting))
    assert (training.plan.batch, training.plan.batches) == (10, 4)
    training.try_out()


def test_batches_of_a_loader_are_taken_as_they_come(folder: Path) -> None:
    run = runs(folder, TOP.replace("mydata.py:make", "mydata.py:batches"))[0]
    training = Training(run, load_sets(run.setting))
    assert (training.plan.batch, training.plan.batches) == (10, 4)
    assert numbers(resumed(run, 6)).epochs == numbers(whole(run)).epochs


def test_a_loss_of_torch_and_a_metric_of_torchmetrics(folder: Path) -> None:
    pytest.importorskip("torchmetrics")
    text = 'task = "supervised"\n' + TOP.replace("mydata.py:make", "mydata.py:sizes")
    text += 'loss = "torch.nn:HuberLoss"\nloss_options = { delta = 0.5 }\n'
    text += '[metrics.r2]\nuse = "torchmetrics:R2Score"\n'
    run = runs(folder, text)[0]
    experiment = read(folder / "mine.toml", metric="r2")
    assert experiment.higher_is_better
    assert not experiment.metrics["r2"].percent
    assert read(folder / "mine.toml").metric == "loss"
    last = whole(run).epochs[-1]
    sets = load_sets(run.setting)
    assert sets.classes == 1
    targets = torch.cat([target for _, target in sets.test.batches(5)])
    assert last.value("r2") <= 1
    assert last.test_loss < torch.nn.HuberLoss(delta=0.5)(torch.zeros(12), targets)
    assert run.id != runs(folder, text.replace("0.5 }", "0.25 }"))[0].id


def test_a_loss_and_a_metric_of_ones_own_with_classification(folder: Path) -> None:
    text = TOP + 'loss = "mydata.py:softer"\nloss_options = { power = 3 }\n'
    text += '[metrics.zeros]\nuse = "mydata.py:share_of_zeros"\nhigher_is_better = false\n'
    run = runs(folder, text)[0]
    training = Training(run, load_sets(run.setting))
    while training.step():
        pass
    last = training.result().epochs[-1]
    images, labels = next(iter(training.sets.test.batches(12)))
    with torch.no_grad():
        logits = training.trainer.model.eval()(images)
    right = logits.softmax(1).gather(1, labels[:, None])
    assert last.test_loss == pytest.approx((1 - right).pow(3).mean().item(), rel=1e-5)
    assert last.value("zeros") == pytest.approx((logits.argmax(1) == 0).double().mean().item())
    assert not read(folder / "mine.toml", metric="zeros").higher_is_better


def test_a_constant_output_has_collapsed(folder: Path) -> None:
    text = 'task = "supervised"\n' + TOP.replace("mydata.py:make", "mydata.py:sizes")
    run = runs(folder, text + 'loss = "torch.nn:MSELoss"\n')[0]
    training = Training(run, load_sets(run.setting))
    for parameter in training.trainer.model.parameters():
        torch.nn.init.zeros_(parameter)
        parameter.requires_grad_(False)
    next(training.trainer.model.parameters()).requires_grad_(True)
    while training.step():
        pass
    assert training.result().outcome("loss") == "collapsed"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("return self.images[index],", "return self.images[index][:, : 8 - (index == 17)],",
         r"make.*train: sample 17 has inputs \(1, 7, 8\), and sample \d+ has \(1, 8, 8\)"),
        ("return self.images[index],", "return self.image[index],",
         r"sample \d+ failed: AttributeError.*\(mydata\.py:17, in __getitem__\)"),
        ("def make(samples=40):", "def make(samples=40):\n    return 1 / 0",
         r"mydata\.py:make \(mydata\.py:26\) failed: ZeroDivision.*\(mydata\.py:27, in make\)"),
        ("def make(samples=40):", "def make(samples=40):\n    return {'train': Blobs(40, 1)}",
         "gave the keys train, expected"),
        ("Blobs(samples, 1)", "Blobs(0, 1)", "has no samples"),
        ("self.targets = torch.arange(samples) % 3", "self.labels = torch.arange(samples) % 3",
         "targets"),
        ("Blobs(samples, 1)", "iter([])", "is an iterator, which ends with the first epoch"),
    ],
)  # fmt: skip
def test_data_that_cannot_be_used_is_told(folder: Path, old: str, new: str, message: str) -> None:
    file = folder / "mydata.py"
    file.write_text(file.read_text().replace(old, new))
    with pytest.raises(NormkitError, match=message):
        train(runs(folder)[0])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('loss = "torch.nn:HuberLos"\n', "torch.nn has no 'HuberLos'. Did you mean 'HuberLoss'"),
        ('loss = "torch.nn:HuberLoss"\nloss_options = { gamma = 1 }\n', "unexpected keyword"),
        ('[metrics.zeros]\nuse = "mydata.py:share_of_zeros"\n', "which way is better"),
        ('[metrics.f1]\nuse = "nowhere.at:all"\nhigher_is_better = true\n', "was not found"),
        ('[metrics.f1]\nuses = "x"\n', "Did you mean 'use'"),
        ("loss_options = { a = 1 }\n", "belong to train.loss, which is not there"),
    ],
)
def test_a_loss_or_metric_that_is_not_there_is_told_before_training(
    folder: Path, text: str, message: str
) -> None:
    (folder / "mine.toml").write_text(TOP + text)
    with pytest.raises(BadExperiment, match=message):
        read(folder / "mine.toml")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "def softer(output",
            "def softer(a, b):\n    return a\n\n\ndef old(output",
            "gave a tensor",
        ),
        (
            "(output.argmax(1) == 0)",
            "(output.arg(1) == 0)",
            r"metric zeros \(mydata\.py:\d+\) failed",
        ),
    ],
)
def test_a_loss_or_metric_that_fails_is_told_by_the_check(
    folder: Path, old: str, new: str, message: str
) -> None:
    file = folder / "mydata.py"
    file.write_text(file.read_text().replace(old, new))
    text = TOP + 'loss = "mydata.py:softer"\n'
    text += '[metrics.zeros]\nuse = "mydata.py:share_of_zeros"\nhigher_is_better = false\n'
    (folder / "mine.toml").write_text(text)
    with pytest.raises(BadExperiment, match=message):
        check(read(folder / "mine.toml"))


def test_an_output_that_does_not_fit_its_target_is_refused(folder: Path) -> None:
    """It would be broadcast: differences of things that have nothing to do with each other."""
    text = 'task = "supervised"\n' + TOP.replace("mydata.py:make", "mydata.py:sizes")
    file = folder / "mydata.py"
    file.write_text(file.read_text().replace('"classes": 1', '"classes": 3'))
    with pytest.raises(NormkitError, match=r"gives \(10, 3\) for targets \(10,\)"):
        train(runs(folder, text + 'loss = "torch.nn:MSELoss"\n')[0])
    with pytest.raises(BadExperiment, match="needs a loss"):
        runs(folder, text)
