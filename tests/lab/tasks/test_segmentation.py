"""Segmentation on a handful of small images in CamVid's layout."""

from __future__ import annotations

import dataclasses
import zipfile
from pathlib import Path

import pytest
import torch

import normkit as nk
from normkit.errors import NormkitError, OptionError
from normkit.lab.data import sources
from normkit.lab.data.map_files import VOID, voc
from normkit.lab.data.maps import WindowCut, check_maps, map_listing
from normkit.lab.experiment import Data, Run, Setting
from normkit.lab.experiment.records import Model, ModelStep, TaskSpec, Train, Watch
from normkit.lab.models import build
from normkit.lab.tasks import load_sets, make_task
from normkit.lab.tasks.segmentation import map_loss
from normkit.lab.train import Training

Image = pytest.importorskip("PIL.Image")
pytest.importorskip("torchmetrics")
SIZE = (40, 30)  # width, height


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four images to train on and two to test on: the left half is class 0, the right class 1."""
    for part, many in (("train", 4), ("test", 2)):
        (tmp_path / "CamVid" / part).mkdir(parents=True)
        (tmp_path / "CamVid" / f"{part}annot").mkdir()
        for number in range(many):
            save(tmp_path / "CamVid", part, f"frame_{number}", number)
    small = dataclasses.replace(sources.CAMVID, samples=(4, 2))
    monkeypatch.setitem(sources.PUBLISHED, "camvid", small)
    return tmp_path


def save(root: Path, part: str, name: str, number: int) -> None:
    image, classes = Image.new("RGB", SIZE, (40, 40 * number, 40)), Image.new("P", SIZE, 0)
    image.paste((220, 220, 10), (20, 0, 40, 30))
    classes.paste(1, (20, 0, 40, 30))
    classes.paste(11, (0, 28, 40, 30))  # void
    classes.putpalette([255, 0, 0] * 256)  # colours say nothing: the indices are the classes
    image.save(root / part / f"{name}.png")
    classes.save(root / f"{part}annot" / f"{name}.png")


def setting(place: Path, **train: object) -> Setting:
    return Setting(
        Data("camvid", path=str(place), size=32, flip=True),
        Model("native:deeplabv3", options={"backbone": "resnet18"}),
        (ModelStep("norm", "gn"),),
        Train(**{"epochs": 1, "batch": 2, "lr": 0.02, "schedule": "poly", **train}),  # type: ignore[arg-type]
        Watch(),
        TaskSpec("segmentation", {"scales": (0.75, 1.5)}),
    )


def test_one_epoch_is_trained_and_judged(place: Path) -> None:
    training = Training(Run(setting(place), 1), load_sets(setting(place)))
    before = training.trainer.model.head[-1].weight.detach().clone()
    while training.step():
        pass
    assert not torch.equal(training.trainer.model.head[-1].weight, before)
    result = training.result()
    last = result.epochs[-1]
    assert 0 <= last.test("miou") <= 1
    # of the 28 labelled rows half is class 0: one class everywhere has an IoU of 1/2, the other 0
    assert last.value("constant_miou") == pytest.approx(0.25)
    assert len(result.pictures) == 1  # the two test images are one batch
    assert result.collapse() == "" or "one class everywhere has 25.0%" in result.collapse()


def test_a_network_of_another_library_has_random_weights() -> None:
    """Its own default is to download some."""
    pytest.importorskip("segmentation_models_pytorch")
    spec = Model("segmentation_models_pytorch:Unet", options={"encoder_name": "resnet18"})
    model = nk.convert(build(spec, 11, (3, 32, 32)), "gn", groups=4)
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 11, 32, 32)


def test_the_score_counts_intersections_over_unions(place: Path) -> None:
    sets = load_sets(setting(place))
    task = make_task(setting(place))
    from normkit.lab.formats import ImageFormat

    task.attach(setting(place), sets, ImageFormat(torch.device("cpu"), "float32", False), 1)
    score = task.evaluation("test")

    class Answer(torch.nn.Module):
        """Class 1 from column 10 on: 20 of 40 columns are right, and 10 are wrong."""

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            logits = torch.zeros(len(images), 11, *images.shape[2:])
            logits[:, 0, :, :10] = logits[:, 1, :, 10:] = 1
            return logits

    for batch in task.evaluation_batches("test"):
        assert batch[0].shape == (2, 3, 30, 40)  # whole images
        score.add(Answer(), batch)
    values = score.values()
    assert values["miou"] == pytest.approx((10 / 20 + 20 / 30) / 2)
    assert values["pixel_accuracy"] == pytest.approx(30 / 40)


def test_a_window_moves_image_and_map_together() -> None:
    column = torch.arange(40.0).expand(30, 40)
    image, classes = column.expand(3, 30, 40), column.to(torch.int16)
    cut = WindowCut(16, flip=True)
    shown, labels = cut(image, classes, [0.5, 0.9, 0.4, 0.1])
    assert shown.shape == (3, 16, 16)
    assert torch.equal(shown[0].long(), labels)
    assert labels[0, 0] > labels[0, 1]  # mirrored
    _, labels = WindowCut(60)(image, classes, [0.5, 0.5, 0.5, 0.9])
    assert (labels[:30, :40] == classes).all()
    assert (labels[30:] == VOID).all()


def test_windows_depend_on_seed_and_epoch_alone(place: Path) -> None:
    train = load_sets(setting(place)).train
    options = {"seed": 3, "epoch": 1, "shuffle": True, "augment": True}
    whole = list(train.batches(2, **options))  # type: ignore[arg-type]
    (late,) = train.batches(2, start=1, **options)  # type: ignore[arg-type]
    assert torch.equal(whole[1][0], late[0])
    other = list(train.batches(2, **{**options, "epoch": 2}))  # type: ignore[arg-type]
    assert not torch.equal(whole[0][0], other[0][0])


def test_a_window_without_labels_has_no_loss() -> None:
    logits = torch.randn(1, 3, 2, 2, requires_grad=True)
    loss = map_loss(logits, torch.full((1, 2, 2), VOID))
    loss.backward()
    assert loss == 0
    assert logits.grad is not None
    assert not logits.grad.any()


def test_a_zip_file_is_read_in_place(place: Path) -> None:
    folder = setting(place)
    with zipfile.ZipFile(place / "camvid.zip", "w") as archive:
        for file in sorted((place / "CamVid").rglob("*.png")):
            archive.write(file, file.relative_to(place))
    packed = dataclasses.replace(folder, data=dataclasses.replace(folder.data, path=None))
    one = next(load_sets(folder).test.batches(2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NORMKIT_DATA", str(place / "only"))
        (place / "only").mkdir()
        (place / "camvid.zip").rename(place / "only" / "camvid.zip")
        other = next(load_sets(packed).test.batches(2))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("class", r"frame_2\.png has class 12 at row 0, column 0: expected 0 to 10, or 11 for"),
        ("size", r"trainannot/frame_2\.png has 8×8 pixels, and its image .* has 40×30"),
        ("colour", r"frame_2\.png is an image of mode RGB, expected one with an index"),
        ("missing", r"trainannot/frame_2\.png is listed, but is not there\. Expected CamVid"),
        ("damaged", r"frame_2\.png cannot be read as an image"),
    ],
)
def test_a_file_that_does_not_fit_is_named(place: Path, fault: str, message: str) -> None:
    file = place / "CamVid" / "trainannot" / "frame_2.png"
    if fault == "class":
        Image.new("L", SIZE, 12).save(file)
    elif fault == "size":
        Image.new("L", (8, 8), 0).save(file)
    elif fault == "colour":
        Image.new("RGB", SIZE).save(file)
    elif fault == "missing":
        file.unlink()
    else:
        file.write_bytes(b"no image")
    with pytest.raises(NormkitError, match=message):
        load_sets(setting(place))
    if fault != "missing":  # told by normkit lab check already
        with pytest.raises(NormkitError, match=message):
            check_maps(map_listing(setting(place).data))


def test_maps_without_a_class_and_damaged_images_are_told_before_training(place: Path) -> None:
    for number in range(4):
        Image.new("L", SIZE, 11).save(place / "CamVid" / "trainannot" / f"frame_{number}.png")
    with pytest.raises(NormkitError, match="none of the 4 training maps has a class, all is void"):
        check_maps(map_listing(setting(place).data))
    (place / "CamVid" / "train" / "frame_1.png").write_bytes(b"no image")
    with pytest.raises(NormkitError, match=r"train/frame_1\.png cannot be read"):
        check_maps(map_listing(setting(place).data))


def test_sets_and_tasks_that_do_not_belong_together_are_refused(place: Path) -> None:
    with pytest.raises(OptionError, match=r"'digits', which has a label.*Try camvid, voc-seg"):
        load_sets(dataclasses.replace(setting(place), data=Data("digits")))
    with pytest.raises(OptionError, match=r"'camvid', which has a map of .*segmentation"):
        load_sets(dataclasses.replace(setting(place), task=TaskSpec()))
    cropped = dataclasses.replace(setting(place).data, crop=4)
    with pytest.raises(OptionError, match=r"data\.crop is not for images with maps"):
        load_sets(dataclasses.replace(setting(place), data=cropped))
    with pytest.raises(OptionError, match="expected two factors"):
        make_task(Setting(task=TaskSpec("segmentation", {"scales": (2, 1)})))
    task = make_task(setting(place))
    with pytest.raises(OptionError, match=r"expected logits \(2, 11, 32, 32\)"):
        task.try_model(torch.nn.Flatten(), 2, 11, (3, 32, 32))


def test_voc_is_read_by_its_lists(tmp_path: Path) -> None:
    names = {"trainaug": ["2007_000032", "2011_003065"], "val": ["2007_000033"]}
    for folder in ("JPEGImages", "SegmentationClassAug", "ImageSets/Segmentation"):
        (tmp_path / folder).mkdir(parents=True)
    for part, stems in names.items():
        (tmp_path / "ImageSets/Segmentation" / f"{part}.txt").write_text("\n".join(stems) + "\n")
        for stem in stems:
            Image.new("RGB", (20, 10)).save(tmp_path / "JPEGImages" / f"{stem}.jpg")
            Image.new("L", (20, 10), 20).save(tmp_path / "SegmentationClassAug" / f"{stem}.png")
    listing = voc([tmp_path / "JPEGImages"])
    assert (len(listing.train), len(listing.test), listing.classes) == (2, 1, 21)
    check_maps(listing)
    # "none of the 0 training maps has a class, all is void"
    (tmp_path / "ImageSets/Segmentation/trainaug.txt").write_text("\n")
    with pytest.raises(NormkitError, match=r"Segmentation/trainaug\.txt is empty"):
        voc([tmp_path / "JPEGImages"])


def test_the_real_camvid(request: pytest.FixtureRequest) -> None:
    import os

    if not os.environ.get("NORMKIT_DATA"):
        pytest.skip("NORMKIT_DATA is not set: CamVid is not there")
    try:
        listing = map_listing(Data("camvid"))
    except NormkitError as error:
        pytest.skip(str(error))
    assert (len(listing.train), len(listing.test)) == (367, 233)
    check_maps(listing)
