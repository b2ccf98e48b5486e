"""Somebody's own objects, maps and clips, in the layouts of COCO, VOC and Something-Something."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from normkit.errors import NormkitError
from normkit.lab.data import folders
from normkit.lab.data.own import _fingerprint, fingerprint
from normkit.lab.experiment import Data, Experiment, Run, Setting
from normkit.lab.experiment.checks import check_data
from normkit.lab.experiment.records import Model, ModelStep, TaskSpec, Train, Variant
from normkit.lab.tasks import load_sets, make_task
from normkit.lab.train import Training

Image = pytest.importorskip("PIL.Image")
pytest.importorskip("torchmetrics")
pytest.importorskip("faster_coco_eval")
WIDTH, HEIGHT = 64, 48
PARTS = {"train": 3, "test": 2}
XML = """<annotation><size><width>64</width><height>48</height></size>
<object><name>{}</name><bndbox><xmin>{}</xmin><ymin>8</ymin><xmax>{}</xmax><ymax>32</ymax></bndbox>
</object></annotation>"""
DETECTOR = {
    "backbone": "resnet18", "min_size": 48, "max_size": 64, "smallest_anchor": 8, "proposals": 8,
}  # fmt: skip


def picture(file: Path, left: int) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    image = Image.new("RGB", (WIDTH, HEIGHT), (30, 30, 30))
    image.paste((250, 250, 250), (left, 8, left + 20, 32))
    image.save(file)


def write_text(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def as_coco(root: Path) -> None:
    for part, many in PARTS.items():
        content = {
            "categories": [{"id": 3, "name": "cup"}, {"id": 9, "name": "pen"}],
            "images": [
                {"id": n, "file_name": f"{n}.png", "height": HEIGHT, "width": WIDTH}
                for n in range(many)
            ],
            "annotations": [
                {
                    "image_id": n,
                    "category_id": (3, 9)[n % 2],
                    "bbox": [4 * n, 8, 20, 24],
                    "segmentation": [[4 * n, 8, 4 * n + 20, 8, 4 * n + 20, 32, 4 * n, 32]],
                }
                for n in range(many)
            ],
        }
        write_text(root / "annotations" / f"instances_{part}.json", json.dumps(content))
        for n in range(many):
            picture(root / "images" / part / f"{n}.png", 4 * n)


def stems(part: str) -> list[str]:
    return [f"{part}_{n}" for n in range(PARTS[part])]


def as_voc(root: Path) -> None:
    for part in PARTS:
        write_text(root / "ImageSets" / "Main" / f"{part}.txt", "\n".join(stems(part)) + "\n")
        for n, stem in enumerate(stems(part)):
            picture(root / "JPEGImages" / f"{stem}.png", 4 * n)
            name = ("cup", "pen")[n % 2]
            write_text(root / "Annotations" / f"{stem}.xml", XML.format(name, 4 * n, 4 * n + 20))


def as_maps(root: Path) -> None:
    (root / "SegmentationClass").mkdir(parents=True)
    for part in PARTS:
        lists = root / "ImageSets" / "Segmentation"
        write_text(lists / f"{part}.txt", "\n".join(stems(part)) + "\n")
        for n, stem in enumerate(stems(part)):
            picture(root / "JPEGImages" / f"{stem}.jpg", 4 * n)
            classes = Image.new("L", (WIDTH, HEIGHT), 0)
            classes.paste(1 + n % 2, (4 * n, 8, 4 * n + 20, 32))
            classes.paste(255, (0, 46, WIDTH, HEIGHT))  # void
            classes.save(root / "SegmentationClass" / f"{stem}.png")


def as_frames(root: Path) -> None:
    for part in PARTS:
        lines = [f"{stem} 4 {n % 2}" for n, stem in enumerate(stems(part))]
        write_text(root / f"{part}.txt", "\n".join(lines) + "\n")
        for stem in stems(part):
            for frame in range(1, 5):
                picture(root / "frames" / stem / f"{frame:05}.jpg", 8 * frame)


def as_classes(root: Path) -> None:
    for part, classes, many in (("train", ("ant", "bee", "cat"), 1), ("test", ("dog", "elk"), 3)):
        for left, name in enumerate(classes):
            for n in range(many):
                picture(root / part / name / f"{n}.png", 10 * left + n)


def as_domains(root: Path) -> None:
    for domain, many in (("day", 3), ("night", 2)):
        for n in range(many):
            picture(root / domain / ("cup", "pen")[n % 2] / f"{n}.png", 8 * n)


FEW = (Model("native:small_cnn"), TaskSpec("few-shot", {
    "ways": 2, "shots": (1,), "queries": 2, "episodes": 4,
}))  # fmt: skip
TRANSFER = (
    Model("native:small_cnn"), TaskSpec("adaptation", {"source": "day", "target": "night"}),
)  # fmt: skip
DETECTION = (Model("native:faster_rcnn", options=DETECTOR), TaskSpec("detection"))
MASKS = (Model("native:mask_rcnn", options=DETECTOR), TaskSpec("detection", {"masks": True}))
MAPS = (Model("native:deeplabv3", options={"backbone": "resnet18"}), TaskSpec("segmentation"))
CLIPS = (Model("torchvision:resnet18", stem="cifar"), TaskSpec("video", {"frames": 2}))
FORMS = {
    "coco-folder": (as_coco, MASKS, 2),
    "voc-folder": (as_voc, DETECTION, 2),
    "voc-segmentation-folder": (as_maps, MAPS, 3),
    "frames-folder": (as_frames, CLIPS, 2),
    "new-classes-folder": (as_classes, FEW, 3),
    "domains-folder": (as_domains, TRANSFER, 2),
}


def made(name: str, root: Path) -> Setting:
    write, (model, task), _ = FORMS[name]
    write(root)
    return Setting(
        Data(name, path=str(root), size=32),
        model,
        (ModelStep("norm", "gn"),),
        Train(epochs=1, batch=2, lr=0.005),
        task=task,
    )


@pytest.mark.parametrize("name", FORMS)
def test_own_data_of_any_number_is_trained_on(name: str, tmp_path: Path) -> None:
    """Only the published numbers of images were taken: "coco has 4 and 4 images to train and to
    test on, expected 117,266 and 5,000"."""
    asked = made(name, tmp_path)
    task = make_task(asked)
    task.locate(asked)
    classes = FORMS[name][2]
    assert task.training_samples(asked) == 3
    assert task.classes_and_shape(asked)[0] == classes
    sets = load_sets(asked)
    tested = 6 if name == "new-classes-folder" else 2
    assert (len(sets.train), len(sets.test), sets.classes) == (3, tested, classes)
    training = Training(Run(asked, 1), sets)
    while training.step():
        pass
    result = training.result()
    assert result.status == "done"
    assert result.epochs[-1].train_loss > 0


def replace_text(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


def other_box(root: Path) -> None:
    replace_text(root / "Annotations" / "train_0.xml", "<xmax>20<", "<xmax>21<")


def other_map(root: Path) -> None:
    file = root / "SegmentationClass" / "train_0.png"
    image = Image.open(file).transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    size = file.stat().st_size
    image.save(file)
    content = file.read_bytes()
    file.write_bytes(content + b"\0" * (size - len(content)))
    assert file.stat().st_size == size


def moved_to_test(root: Path) -> None:
    """The last image to train on becomes the first one to test on."""
    lists = root / "ImageSets" / "Main"
    replace_text(lists / "train.txt", "train_2\n", "")
    (lists / "test.txt").write_text("train_2\n" + (lists / "test.txt").read_text())


CHANGES = {
    "a category": ("coco-folder", "annotations/instances_train.json", '_id": 3', '_id": 9'),
    "an image": ("coco-folder", "images/test/1.png", None, None),
    "a box": ("voc-folder", other_box, None, None),
    "a part": ("voc-folder", moved_to_test, None, None),
    "a map": ("voc-segmentation-folder", other_map, None, None),
    "an image of a domain": ("domains-folder", "night/cup/0.png", None, None),
    "an image of a class": ("new-classes-folder", "train/bee/0.png", None, None),
    "a label": ("frames-folder", "train.txt", "train_2 4 0", "train_2 4 1"),
    "a frame": ("frames-folder", "frames/test_1/00003.jpg", None, None),
}


@pytest.mark.parametrize("what", CHANGES)
def test_runs_are_known_by_what_the_files_say(what: str, tmp_path: Path) -> None:
    name, change, old, new = CHANGES[what]
    one, copy = made(name, tmp_path / "a"), made(name, tmp_path / "b")
    before = Run(one, 1).id
    assert Run(copy, 1).id == before
    if callable(change):
        change(tmp_path / "b")
    elif old is not None and new is not None:
        replace_text(tmp_path / "b" / str(change), old, new)
    else:
        Image.new("RGB", (WIDTH, HEIGHT), (200, 10, 10)).save(tmp_path / "b" / str(change))
    _fingerprint.cache_clear()  # as in the next process
    assert Run(copy, 1).id != before
    stated = dataclasses.replace(copy.data, fingerprint=fingerprint(one.data))
    with pytest.raises(NormkitError, match=r"is not the data of data\.fingerprint"):
        load_sets(dataclasses.replace(copy, data=stated))


@pytest.mark.parametrize(
    ("name", "file", "old", "new", "message"),
    [
        ("voc-folder", "Annotations/test_1.xml", ">pen<", ">cap<",
         r"test_1\.xml has an object of class 'cap', expected cup, pen"),
        ("voc-folder", "ImageSets/Main/train.txt", None, "\n",
         r"Main/train\.txt is empty: expected the name of an image a line"),
        ("voc-folder", "ImageSets/Main/test.txt", "test_1", "test_7",
         r"Annotations/test_7\.xml is listed, but is not there"),
        ("voc-segmentation-folder", "ImageSets/Segmentation/test.txt", None, "",
         r"Segmentation/test\.txt is empty"),
        ("coco-folder", "annotations/instances_test.json", '"id": 9', '"id": 8',
         r"test\.json lists category 8 \('pen'\), and .*train\.json does not list it"),
        ("coco-folder", "annotations/instances_test.json", '"name": "pen"', '"name": "cap"',
         r"test\.json lists category 9 \('cap'\), and .*train\.json lists 'pen'"),
        ("frames-folder", "test.txt", "test_1 4 1", "test_1 4 2",
         r"test\.txt, line 2: the label is 2, expected 0 to 1"),
        ("frames-folder", "train.txt", "train_1 4 1", "train_1 4 2",
         r"train\.txt has no clip of class 1, and labels up to 2"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(
    name: str, file: str, old: str | None, new: str, message: str, tmp_path: Path
) -> None:
    asked = made(name, tmp_path)
    if old is None:
        (tmp_path / file).write_text(new)
    else:
        replace_text(tmp_path / file, old, new)
    with pytest.raises(NormkitError, match=message):
        make_task(asked).locate(asked)


BEGIN = "[[0, 8, 20, 8, 20, 32, 0, 32]]"  # of the first object


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (BEGIN, '{"size": [24, 32], "counts": [0, 768]}',
         r"train/0\.png: object 1 has a mask of 32×24 pixels, and the image 64×48"),
        (BEGIN, '{"size": [48, 64], "counts": [5, 10]}',
         r"train/0\.png: object 1 has runs of 15 pixels, expected 64×48"),
        (BEGIN, '{"size": [48, 64], "counts": "~~~"}',
         r"train/0\.png: the mask of object 1 cannot be decoded"),
        (BEGIN, "[[0, 8, 20, 8]]", r"train/0\.png: object 1 has a polygon of 4 numbers"),
        (BEGIN, "[[0, 8, 20, 8, 20, null]]", r"train/0\.png: object 1 has a polygon \[0, 8, 20"),
        (BEGIN, "null", r"train/0\.png: object 1 has no segmentation, which masks are made of"),
        ('"image_id": 0', '"image_id": 44',
         r"train\.json: entry 0 of annotations is of image 44, which is not listed"),
    ],
)  # fmt: skip
def test_masks_that_cannot_be_are_named_by_a_check(
    old: str, new: str, message: str, tmp_path: Path
) -> None:
    """They were decoded before they were looked at: a RuntimeError of torch.stack, a ValueError or
    an AttributeError without a file, or not a word."""
    asked = made("coco-folder", tmp_path)
    replace_text(tmp_path / "annotations" / "instances_train.json", old, new)
    with pytest.raises(NormkitError, match=message) as told:
        make_task(asked).locate(asked)
    assert "Expected in data.path" not in str(told.value)  # the set is there


def test_a_test_image_without_objects_is_judged_by_masks_too(tmp_path: Path) -> None:
    """Where it came first, the set was said to have no masks; later on torchmetrics stumbled."""
    asked = made("coco-folder", tmp_path)
    replace_text(tmp_path / "annotations/instances_test.json", '"image_id": 0', '"image_id": 1')
    make_task(asked).locate(asked)
    sets = load_sets(asked)
    _, targets = next(sets.test.batches(2))
    assert [tuple(each["masks"].shape) for each in targets] == [(0, 48, 64), (2, 48, 64)]
    training = Training(Run(asked, 1), sets)
    while training.step():
        pass
    assert 0 <= training.result().epochs[-1].test("mask_ap") <= 1


def test_a_category_that_is_only_tested_is_a_caution(tmp_path: Path) -> None:
    asked = made("coco-folder", tmp_path)
    file = tmp_path / "annotations" / "instances_train.json"
    file.write_text(file.read_text().replace('"category_id": 9', '"category_id": 3'))
    variants = (Variant("one", asked),)
    (caution,) = check_data(Experiment("mine", "", variants, (1,), "one"))
    assert re.search(r"test\.json, image 1 has an object of category 9 \('pen'\), of wh", caution)


def test_a_class_of_the_test_that_no_training_map_has_is_named(tmp_path: Path) -> None:
    asked = made("voc-segmentation-folder", tmp_path)
    Image.new("L", (WIDTH, HEIGHT), 3).save(tmp_path / "SegmentationClass" / "test_0.png")
    with pytest.raises(NormkitError, match=r"test_0\.png has class 3 at row 0.*expected 0 to 2"):
        make_task(asked).locate(asked)
    for stem in stems("train"):
        Image.new("L", (WIDTH, HEIGHT), 0).save(tmp_path / "SegmentationClass" / f"{stem}.png")
    with pytest.raises(NormkitError, match="the 3 maps to train on have no class but 0"):
        make_task(asked).locate(asked)


def test_lists_that_hold_each_other_are_not_taken(tmp_path: Path) -> None:
    """trainval has the images of val in it."""
    asked = made("voc-folder", tmp_path)
    lists = tmp_path / "ImageSets" / "Main"
    (lists / "test.txt").rename(lists / "val.txt")
    (lists / "trainval.txt").write_text("\n".join(stems("train") + stems("test")))
    sets = load_sets(asked)
    assert (len(sets.train), len(sets.test)) == (3, 2)
    (lists / "train.txt").unlink()
    with pytest.raises(NormkitError, match=r"Main has no two lists: expected trainval\.txt and te"):
        load_sets(asked)


def test_new_classes_are_new(tmp_path: Path) -> None:
    asked = made("new-classes-folder", tmp_path)
    picture(tmp_path / "test" / "ant" / "0.png", 3)
    with pytest.raises(NormkitError, match=r"test has classes that .*train has, too: ant"):
        make_task(asked).locate(asked)


@pytest.mark.parametrize("name", FORMS)
def test_a_path_may_be_relative(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = made(name, tmp_path / "set")
    monkeypatch.chdir(tmp_path)
    near = dataclasses.replace(asked, data=dataclasses.replace(asked.data, path="set"))
    assert fingerprint(near.data) == fingerprint(asked.data)
    make_task(near).locate(near)


def test_images_of_every_ending_are_found_in_domains(tmp_path: Path) -> None:
    """Folders of classes had them all, domains only four: the others were left out silently."""
    as_domains(tmp_path)
    before = len(folders.domains_folder([tmp_path]).domains["day"].paths)
    endings = (".bmp", ".TIF", ".tiff", ".webp", ".jpeg")
    for ending in endings:
        picture(tmp_path / "day" / "cup" / f"more{ending}", 8)
    after = folders.domains_folder([tmp_path]).domains["day"].paths
    assert len(after) == before + len(endings)
