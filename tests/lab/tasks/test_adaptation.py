"""Domain adaptation on a handful of images: dark ones with labels, bright ones without."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from normkit.errors import NormkitError, OptionError
from normkit.lab.data import sources
from normkit.lab.data.domain_files import domains
from normkit.lab.data.domains import DomainSets
from normkit.lab.experiment import Data, Run, Setting
from normkit.lab.experiment.records import Model, ModelStep, TaskSpec, Train
from normkit.lab.tasks import load_sets, make_task
from normkit.lab.tasks.adaptation import Adaptation, coral
from normkit.lab.train import Training
from tests.lab.train.stand_ins import numbers

Image = pytest.importorskip("PIL.Image")
BRIGHTNESS = {"art_painting": 20, "cartoon": 90, "photo": 150, "sketch": 220}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for domain, value in BRIGHTNESS.items():
        for kind in ("dog", "horse"):
            (tmp_path / "PACS" / domain / kind).mkdir(parents=True)
            for number in range(4):
                image = Image.new("RGB", (24, 20), (value, value, value + number))
                image.paste((0, 0, 0), (0, 0, 12, 20) if kind == "dog" else (0, 0, 24, 10))
                image.save(tmp_path / "PACS" / domain / kind / f"{number}.png")
    small = dataclasses.replace(sources.PACS, samples=(32, 32), classes=2)
    monkeypatch.setitem(sources.PUBLISHED, "pacs", small)
    return tmp_path


def setting(place: Path, norm: str = "bn", **options: object) -> Setting:
    transfer = {"source": "art_painting", "target": "sketch", **options}
    return Setting(
        Data("pacs", path=str(place), size=16, normalize="none"),
        Model("native:small_cnn"),
        (ModelStep("norm", norm),),
        Train(epochs=2, batch=4, lr=0.02),
        task=TaskSpec("adaptation", transfer),
    )


def finished(asked: Setting) -> Training:
    training = Training(Run(asked, 1), load_sets(asked))
    while training.step():
        pass
    return training


def test_each_domain_has_statistics_of_its_own(place: Path) -> None:
    training = finished(setting(place))
    task, model = training.task, training.trainer.model
    assert isinstance(task, Adaptation)
    assert task.profiles is not None
    assert task.profiles.active == "target"
    mean = model.conv1.norm.running_mean.clone()
    with task.of_source():
        other = model.conv1.norm.running_mean.clone()
    assert not torch.allclose(mean, other)
    only = finished(setting(place, method="source"))
    # nothing but the source has been seen: its statistics come near those that it has here
    alone = only.trainer.model.conv1.norm.running_mean
    assert (alone - other).abs().mean() < (alone - mean).abs().mean()


@pytest.mark.parametrize("norm", ["bn", "gn"])
def test_covariances_are_drawn_together(place: Path, norm: str) -> None:
    result = finished(setting(place, norm, method="coral", weight=0.5)).result()
    assert 0 <= result.epochs[-1].test("accuracy") <= 1
    assert len(result.epochs) == 2


def test_an_interrupted_run_goes_on_to_the_same_numbers(place: Path) -> None:
    asked = setting(place, method="coral")
    whole = finished(asked)
    sets = load_sets(asked)
    half = Training(Run(asked, 1), sets)
    for _ in range(2):
        half.step()
    rest = Training(Run(asked, 1), sets)
    rest.load_state_dict(half.state_dict())
    while rest.step():
        pass
    assert numbers(rest.result()).epochs == numbers(whole.result()).epochs


def test_the_target_is_given_without_its_labels_and_as_often_as_needed(place: Path) -> None:
    asked = setting(place, method="coral")
    sets = load_sets(asked)
    assert isinstance(sets, DomainSets)
    training = Training(Run(asked, 1), sets)
    batches = list(training.task.batches(training.plan, 0, 0))
    assert len(batches) == 2
    images, _, other = batches[0]
    assert images.max() < 0.2 < other.max()
    (late,) = training.task.batches(training.plan, 0, 1)
    assert torch.equal(late[2], batches[1][2])


def test_coral_is_zero_for_the_same_covariances() -> None:
    x = torch.randn(32, 5)
    assert coral(x, x + 3) == pytest.approx(0, abs=1e-9)
    assert coral(x, 2 * x) > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": "skech"}, r"pacs has no domain 'skech' \(target\)\. .*sketch"),
        ({"target": "art_painting"}, "source and target are both 'art_painting'"),
        ({"method": "can"}, "method is 'can'"),
        ({"weight": -1}, "weight is -1"),
    ],
)
def test_a_transfer_that_cannot_be_is_told_before_training(
    place: Path, options: dict[str, object], message: str
) -> None:
    asked = setting(place, **options)
    with pytest.raises(OptionError, match=message):
        make_task(asked).locate(asked)


def test_a_class_that_a_domain_lacks_is_named(tmp_path: Path) -> None:
    for folder in ("amazon/images/bike", "amazon/images/mug", "dslr/images/bike"):
        (tmp_path / folder).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / folder / "frame_0001.jpg")
    with pytest.raises(NormkitError, match="dslr has no images of 'mug'"):
        domains([tmp_path / "amazon"])
    (tmp_path / "dslr/images/mug").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "dslr/images/mug/frame_0001.jpg")
    listing = domains([tmp_path / "amazon"])
    assert (sorted(listing.domains), listing.classes) == (["amazon", "dslr"], 2)
