"""Few-shot learning on a handful of characters in Omniglot's layout."""

from __future__ import annotations

import dataclasses
import io
import os
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

from normkit.errors import NormkitError, OptionError
from normkit.lab import data
from normkit.lab.data import few_shot, sources
from normkit.lab.data.records import Raw, Split
from normkit.lab.experiment import Data, Run, Setting
from normkit.lab.experiment.records import Model, ModelStep, TaskSpec, Train
from normkit.lab.formats import ImageFormat
from normkit.lab.models.networks import ResNet12
from normkit.lab.tasks import load_sets, make_task
from normkit.lab.tasks.few_shot import FewShot, ImprintedNetwork, episode_accuracy
from normkit.lab.train import Training

Image = pytest.importorskip("PIL.Image")
# alphabets of both archives, with so many characters; Greek is in both
ARCHIVES = ({"Greek": 2, "Latin": 1}, {"Greek": 2, "Sanskrit": 2, "Tagalog": 1})


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("omniglot")
    for number, alphabets in enumerate(ARCHIVES, 1):
        top = f"images_background_small{number}"
        with zipfile.ZipFile(folder / f"{top}.zip", "w") as archive:
            for alphabet, many in alphabets.items():
                for character in range(1, many + 1):
                    for drawing in range(1, 21):
                        name = f"{top}/{alphabet}/character{character:02}/{drawing:02}.png"
                        archive.writestr(name, png(character + 5 * len(alphabet), drawing))
    return folder


def png(character: int, drawing: int) -> bytes:
    image = Image.new("1", (105, 105), 1)
    image.paste(0, (character, 10, character + 20, 20 + drawing))
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    few = dataclasses.replace(sources.OMNIGLOT_SMALL, samples=(60, 60), classes=3)
    monkeypatch.setitem(sources.PUBLISHED, "omniglot-small", few)


OPTIONS = {"ways": 3, "shots": (1, 2), "queries": 5, "episodes": 20}


def setting(place: Path, **options: object) -> Setting:
    return Setting(
        Data("omniglot-small", path=str(place), size=16),
        Model("native:resnet12", options={"width": 4}),
        (ModelStep("norm", "bn"),),
        Train(epochs=1, batch=20, lr=0.05),
        task=TaskSpec("few-shot", {**OPTIONS, **options}),
    )


def test_one_epoch_is_trained_and_judged(place: Path) -> None:
    training = Training(Run(setting(place), 1), load_sets(setting(place)))
    assert tuple(training.trainer.model.weight.shape) == (3, 32)
    while training.step():
        pass
    result = training.result()
    last = result.epochs[-1]
    assert len(last.units["test_1_shot"]) == 20
    assert last.test("2_shot") == pytest.approx(sum(last.units["test_2_shot"]) / 20)
    assert last.test("1_shot_interval") > 0
    assert len(result.pictures) == 2


def test_two_archives_give_each_character_once(place: Path) -> None:
    sets = data.load(setting(place).data, kind="episodes")
    assert (len(sets.train), len(sets.test), sets.classes) == (60, 60, 3)
    assert sets.train.labels.tolist() == [0] * 20 + [1] * 20 + [2] * 20  # type: ignore[attr-defined]
    images, _ = next(sets.train.batches(60))
    # strokes are white: the paper is the lowest value, and fills most of it
    assert (images == images.min()).float().mean() > 0.8


def test_episodes_are_the_same_for_every_run_and_never_mix_examples_and_queries(
    place: Path,
) -> None:
    def drawn() -> torch.Tensor:
        task = make_task(setting(place))
        assert isinstance(task, FewShot)
        format = ImageFormat(torch.device("cpu"), "float32", False)
        task.attach(setting(place), load_sets(setting(place)), format, seed=7)
        return task.drawn("test", 2)

    first = drawn()
    assert first.shape == (20, 3, 7)
    assert torch.equal(first, drawn())
    for episode in first:
        assert len(set(episode.flatten().tolist())) == 21
        classes = episode // 20
        assert (classes == classes[:, :1]).all()
        assert len(set(classes[:, 0].tolist())) == 3


def test_queries_get_the_class_with_the_nearest_mean_direction() -> None:
    up, right = torch.tensor([0.0, 1.0]), torch.tensor([1.0, 0.0])
    first = torch.stack([up, up, up, right])  # two examples, two queries: one of them is wrong
    second = torch.stack([right, right, right, right])
    assert episode_accuracy(torch.stack([first, second]), shot=2) == 0.75


def test_features_are_directions_and_classes_have_one_scale() -> None:
    model = ImprintedNetwork(ResNet12(7, (1, 16, 16), width=4), 7)
    images = torch.randn(4, 1, 16, 16)
    assert torch.allclose(model.features(images).norm(dim=1), torch.ones(4), atol=1e-5)
    assert (model(images).abs() <= model.scale + 1e-4).all()
    with pytest.raises(OptionError, match="does not end with a linear layer for 9 classes"):
        ImprintedNetwork(nn.Sequential(nn.Linear(3, 4)), 9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ways": 4}, "has 4 ways, and the test set of omniglot-small has 3 classes"),
        ({"shots": (1, 18)}, r"18 shots and 5 queries of a class, .* has 20 images"),
        ({"ways": 1}, "ways is 1, expected 2 or more"),
        ({"shots": ()}, "shots is empty"),
    ],
)
def test_episodes_that_cannot_be_drawn_are_told_before_training(
    place: Path, options: dict[str, object], message: str
) -> None:
    asked = setting(place, **options)
    with pytest.raises(OptionError, match=message):
        make_task(asked).locate(asked)


def test_sets_of_another_kind_are_refused(place: Path) -> None:
    with pytest.raises(OptionError, match=r"'digits', which has a label.*Try omniglot"):
        make_task(dataclasses.replace(setting(place), data=Data("digits")))
    with pytest.raises(OptionError, match=r"other classes in its test.*few-shot"):
        load_sets(dataclasses.replace(setting(place), task=TaskSpec()))


def test_a_character_that_lacks_a_drawing_is_named(place: Path, tmp_path: Path) -> None:
    (tmp_path / "images_background_small2.zip").write_bytes(
        (place / "images_background_small2.zip").read_bytes()
    )
    top = "images_background_small1"
    with (
        zipfile.ZipFile(place / f"{top}.zip") as whole,
        zipfile.ZipFile(tmp_path / f"{top}.zip", "w") as less,
    ):
        for name in whole.namelist()[1:]:
            less.writestr(name, whole.read(name))
    with pytest.raises(NormkitError, match=r"Greek/character01 has 19 drawings, expected 20"):
        load_sets(setting(tmp_path))


def test_fc100_keeps_whole_superclasses_apart() -> None:
    labels = torch.arange(100)
    part = Split(labels.view(-1, 1, 1, 1).to(torch.uint8), labels)
    raw = few_shot.fc100(lambda files: Raw(part, part))([])
    base, novel = ({int(x) for x in each.images.flatten()} for each in (raw.train, raw.test))
    assert (len(base), len(novel)) == (60, 20)
    assert not base & novel
    assert novel == set(few_shot.FC100_TEST)
    assert int(raw.test.labels.max()) == 19


def test_mini_imagenet_is_read_by_its_lists(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    for name in ("a1", "a2", "b1"):
        Image.new("RGB", (84, 84)).save(tmp_path / "images" / f"{name}.jpg")
    (tmp_path / "train.csv").write_text("filename,label\na1.jpg,n01\na2.jpg,n01\n")
    (tmp_path / "test.csv").write_text("filename,label\nb1.jpg,n02\n")
    files = [tmp_path / "train.csv", tmp_path / "test.csv", tmp_path / "images"]
    listing = few_shot.mini_imagenet(files)
    assert (len(listing.train), len(listing.test), listing.classes) == (2, 1, 1)
    (tmp_path / "test.csv").write_text("filename,label\nb1.jpg,n02\nb2.jpg,n02\n")
    with pytest.raises(NormkitError, match=r"b2\.jpg is not there, and .*test\.csv, line 3"):
        few_shot.mini_imagenet(files)


def test_the_real_omniglot(monkeypatch: pytest.MonkeyPatch) -> None:
    if not os.environ.get("NORMKIT_DATA"):
        pytest.skip("NORMKIT_DATA is not set: Omniglot is not there")
    monkeypatch.setitem(sources.PUBLISHED, "omniglot-small", sources.OMNIGLOT_SMALL)
    try:
        sets = data.load(Data("omniglot-small", size=16), kind="episodes")
    except NormkitError as error:
        pytest.skip(str(error))
    assert (len(sets.train), len(sets.test), sets.classes) == (3_660, 1_180, 183)
