"""Detection on a handful of small images in the layouts of BCCD, nuclei and COCO."""

from __future__ import annotations

import dataclasses
import json
import os
import warnings
from pathlib import Path

import pytest
import torch

from normkit.errors import NormkitError, OptionError
from normkit.lab.data import sources
from normkit.lab.data.box_files import check_outlines, coco
from normkit.lab.data.boxes import BoxLoader, box_listing
from normkit.lab.data.records import LeftOut
from normkit.lab.experiment import Data, Experiment, Run, Setting
from normkit.lab.experiment.checks import check_data
from normkit.lab.experiment.reading import read
from normkit.lab.experiment.records import Model, ModelStep, TaskSpec, Train, Variant, Watch
from normkit.lab.models import build
from normkit.lab.models.detectors import faster_rcnn
from normkit.lab.models.variant import build_variant
from normkit.lab.tasks import load_sets, make_task
from normkit.lab.tasks.detection import DetectionScore, check_targets
from normkit.lab.train import Training

Image = pytest.importorskip("PIL.Image")
pytest.importorskip("torchmetrics")
pytest.importorskip("faster_coco_eval")
SMALL = {
    "backbone": "resnet18", "min_size": 48, "max_size": 64, "smallest_anchor": 8, "proposals": 8,
}  # fmt: skip
XML = """<annotation><size><width>64</width><height>48</height></size>{}</annotation>"""
OBJECT = """<object><name>{}</name><bndbox><xmin>{}</xmin><ymin>{}</ymin><xmax>{}</xmax>
<ymax>{}</ymax></bndbox></object>"""


@pytest.fixture
def blood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four images with a white cell at another place each; two to test on."""
    root = tmp_path / "BCCD"
    for folder in ("Annotations", "JPEGImages", "ImageSets/Main"):
        (root / folder).mkdir(parents=True)
    for number in range(6):
        image = Image.new("RGB", (64, 48), (30, 30, 30))
        left = 4 * number
        image.paste((250, 250, 250), (left, 8, left + 20, 32))
        image.save(root / "JPEGImages" / f"cell_{number}.jpg")
        write(root, number, OBJECT.format("WBC", left, 8, left + 20, 32))
    lists = {"trainval": range(4), "test": range(4, 6)}
    for name, numbers in lists.items():
        text = "\n".join(f"cell_{number}" for number in numbers)
        (root / "ImageSets/Main" / f"{name}.txt").write_text(text + "\n")
    monkeypatch.setitem(
        sources.PUBLISHED, "bccd", dataclasses.replace(sources.BCCD, samples=(4, 2))
    )
    return tmp_path


def write(root: Path, number: int, objects: str) -> None:
    (root / "Annotations" / f"cell_{number}.xml").write_text(XML.format(objects))


@pytest.fixture
def cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Images of two sizes with two numbered nuclei each."""
    root = tmp_path / "nuclei"
    for part, many in (("train", 2), ("val", 1)):
        (root / part).mkdir(parents=True)
        (root / f"{part}-masks").mkdir()
        for number in range(many):
            size = (64, 48 + 8 * number)
            image, mask = Image.new("RGB", size), Image.new("L", size, 0)
            for nucleus, left in ((1, 4), (2, 36)):
                image.paste((200, 200, 200), (left, 10, left + 16, 30))
                mask.paste(nucleus, (left, 10, left + 16, 30))
            image.save(root / part / f"n{number}.png")
            mask.save(root / f"{part}-masks" / f"n{number}.png")
    monkeypatch.setitem(
        sources.PUBLISHED, "nuclei", dataclasses.replace(sources.NUCLEI, samples=(2, 1))
    )
    return tmp_path


def setting(place: Path, name: str = "bccd", **changes: object) -> Setting:
    masks = name == "nuclei"
    given = Setting(
        Data(name, path=str(place), flip=True),
        Model("native:mask_rcnn" if masks else "native:faster_rcnn", options=SMALL),
        (ModelStep("norm", "gn"),),
        Train(epochs=1, batch=2, lr=0.005),
        task=TaskSpec("detection", {"masks": masks}),
    )
    return dataclasses.replace(given, **changes)  # type: ignore[arg-type]


def test_boxes_are_trained_and_judged(blood: Path) -> None:
    watched = setting(
        blood, steps=(ModelStep("norm", "bn"),), watch=Watch(("esm", "stat_diff", "condensation"))
    )
    training = Training(Run(watched, 1), load_sets(watched))
    before = training.trainer.model.backbone.body.conv1.weight.detach().clone()
    while training.step():
        pass
    assert not torch.equal(training.trainer.model.backbone.body.conv1.weight, before)
    result = training.result()
    last = result.epochs[-1]
    assert 0 <= last.test("ap") <= last.test("ap50") <= 1
    parts = ("classifier", "box_reg", "objectness", "rpn_box_reg")
    assert last.train_loss == pytest.approx(sum(last.metrics[f"train_{each}"] for each in parts))
    assert len(last.measures["esm_mean"]) == 20  # the batch norms of a ResNet-18
    assert len(result.pictures) == 1


def test_masks_are_trained_and_judged(cells: Path) -> None:
    asked = setting(cells, "nuclei", data=Data("nuclei", path=str(cells), size=48, flip=True))
    training = Training(Run(asked, 1), load_sets(asked))
    while training.step():
        pass
    last = training.result().epochs[-1]
    assert "train_mask" in last.metrics
    assert 0 <= last.test("mask_ap") <= last.test("mask_ap50") <= 1


def test_the_answer_to_an_image_does_not_depend_on_larger_ones_beside_it(cells: Path) -> None:
    """Test images were judged in batches as they came. A detector fills up the smaller ones with
    zeros, and group norms took them for a part of the image: AP of GN on nuclei came out lower."""
    image = Image.open(cells / "nuclei" / "val" / "n0.png")
    mask = Image.open(cells / "nuclei" / "val-masks" / "n0.png")
    image.resize((128, 96)).save(cells / "nuclei" / "val" / "n1.png")
    mask.resize((128, 96)).save(cells / "nuclei" / "val-masks" / "n1.png")
    one = dataclasses.replace(sources.NUCLEI, samples=(2, 2))
    sources.PUBLISHED["nuclei"] = one  # what the fixture has patched, and puts back
    asked = setting(cells, "nuclei")
    training = Training(Run(asked, 1), load_sets(asked))
    batches = list(training.task.evaluation_batches("test"))
    assert [[tuple(each.shape) for each in images] for images, _ in batches] == [
        [(3, 48, 64)],
        [(3, 96, 128)],
    ]
    assert [len(targets) for _, targets in batches] == [1, 1]


def test_more_objects_than_coco_counts_can_be_asked_for(cells: Path) -> None:
    """Of 200 nuclei that were all found, the best 100 answers have half."""
    corners = torch.arange(200).unsqueeze(1) * torch.tensor([[4.0, 0, 4, 0]])
    truth = {"boxes": corners + torch.tensor([0.0, 0, 3, 3]), "labels": torch.ones(200).long()}
    found = {**truth, "scores": torch.linspace(0.9, 0.1, 200)}
    values = []
    for many in (100, 300):
        task = make_task(setting(cells, task=TaskSpec("detection", {"detections": many})))
        task.format = type("Plain", (), {"autocast": torch.no_grad})()  # type: ignore[assignment]
        score = DetectionScore(task)  # type: ignore[arg-type]
        score.add(lambda images: [found], ([None], [truth]))  # type: ignore[arg-type, return-value]
        values.append(score.values()["ap50"])
    assert values == pytest.approx([51 / 101, 1])  # COCO's precision at 101 recalls
    with pytest.raises(OptionError, match="detections is 5, expected 10 or more"):
        make_task(setting(cells, task=TaskSpec("detection", {"detections": 5})))
    model = build(Model("native:mask_rcnn", options={**SMALL, "detections": 7}), 2, (3, 48, 48))
    assert model.roi_heads.detections_per_img == 7


def test_the_score_is_cocos(blood: Path) -> None:
    task = make_task(setting(blood))
    score = DetectionScore.__new__(DetectionScore)
    DetectionScore.__init__(score, task)  # type: ignore[arg-type]
    task.format = type("Plain", (), {"autocast": torch.no_grad})()  # type: ignore[assignment]
    truth = {"boxes": torch.tensor([[0.0, 0, 10, 10]]), "labels": torch.tensor([1])}

    def answer(images: object) -> list[dict[str, torch.Tensor]]:
        """Of two images one is right, the other 6/10 of the box: an IoU of 0.6."""
        scores = torch.tensor([0.9])
        part = {**truth, "boxes": torch.tensor([[0.0, 0, 10, 6]]), "scores": scores}
        return [{**truth, "scores": scores}, part]

    score.add(answer, ([None, None], [truth, truth]))  # type: ignore[arg-type]
    values = score.values()
    assert values["ap50"] == pytest.approx(1)
    # right at 0.5, 0.55 and, just, 0.6 (10 thresholds); above that half of the objects are found
    assert values["ap75"] == pytest.approx(0.504, abs=0.002)


def test_a_window_takes_boxes_and_masks_along(cells: Path) -> None:
    files = box_listing(Data("nuclei", path=str(cells))).train
    loader = BoxLoader(files, 32, flip=True, masks=True)
    image, target = loader.data[0]
    assert target["boxes"].tolist() == [[4, 10, 20, 30], [36, 10, 52, 30]]
    cut, objects = loader.cut(image, target, [0.0, 0.999, 0.1])  # the right end, mirrored
    assert cut.shape == (3, 32, 32)
    assert objects["boxes"].tolist() == [[12, 10, 28, 30]]
    assert (objects["numbers"] == 2).sum() == 16 * 20
    # a mask and its box say the same after all of it
    (_, [found, _]) = next(loader.batches(2, seed=1, epoch=0, augment=True))
    for box, mask in zip(found["boxes"].long(), found["masks"], strict=True):
        left, top, right, bottom = box.tolist()
        assert mask.sum() == mask[top:bottom, left:right].sum() > 0


def test_an_image_without_objects_is_trained_on(blood: Path) -> None:
    write(blood / "BCCD", 0, "")
    asked = setting(blood)
    images, targets = next(load_sets(asked).train.batches(4))
    assert targets[0]["boxes"].shape == (0, 4)
    model = build(asked.model, 4, (3, 48, 64)).train()
    losses = model(images, targets)
    assert all(torch.isfinite(each) for each in losses.values())


@pytest.mark.parametrize(
    ("objects", "message"),
    [
        (OBJECT.format("WBC", 50, 8, 70, 30), r"cell_2\.xml: box 1, 50 to 70 .* leaves the image"),
        (OBJECT.format("Wolf", 5, 8, 20, 30), r"cell_2\.xml has an object of class 'Wolf'"),
        (OBJECT.format("WBC", "x", 8, 20, 30), r"cell_2\.xml lacks a number"),
        ("<object>", r"cell_2\.xml is no XML"),
    ],
)
def test_objects_that_cannot_be_are_named_before_training(
    blood: Path, objects: str, message: str
) -> None:
    write(blood / "BCCD", 2, objects)
    with pytest.raises(NormkitError, match=message) as told:
        make_task(setting(blood)).locate(setting(blood))
    # the way to get the set stood behind each of them, though it is there
    assert "Shenggan" not in str(told.value)


def test_a_box_without_area_is_left_out_and_told(blood: Path) -> None:
    boxes = ((3, 3, 3, 9), (5, 8, 20, 30), (20, 3, 5, 9))
    write(blood / "BCCD", 2, "".join(OBJECT.format("WBC", *each) for each in boxes))
    with pytest.warns(LeftOut, match=r"cell_2\.xml: box 1, 3 to 3 × 3 to 9, has no area and is"):
        listing = box_listing(setting(blood).data)
    assert listing.train.objects[2].labels.tolist() == [2]
    # a check says it in its own way, once for all variants
    variants = tuple(Variant(name, setting(blood)) for name in ("one", "two"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cautions = check_data(Experiment("mine", "", variants, (1,), "one"))
    assert [each.rpartition(": ")[2] for each in cautions] == [
        "box 1, 3 to 3 × 3 to 9, has no area and is left out.",
        "box 3, 20 to 5 × 3 to 9, ends before it begins and is left out.",
    ]


def test_a_set_without_objects_is_refused(blood: Path, cells: Path) -> None:
    # it was trained on without a word, to a loss of zero
    for number in range(4):
        write(blood / "BCCD", number, "")
    for number in range(2):
        Image.new("L", (64, 48 + 8 * number)).save(cells / f"nuclei/train-masks/n{number}.png")
    for name, images in (("bccd", 4), ("nuclei", 2)):
        asked = setting(blood, name)
        with pytest.raises(NormkitError, match=rf"none of the {images} training images has an ob"):
            make_task(asked).locate(asked)


def test_a_mask_of_another_size_is_named(cells: Path) -> None:
    Image.new("L", (8, 8), 1).save(cells / "nuclei" / "train-masks" / "n1.png")
    asked = setting(cells, "nuclei")
    message = r"n1\.png has 8×8 pixels, and its image .* 64×56"
    for look in (load_sets, make_task(asked).locate):
        with pytest.raises(NormkitError, match=message):
            look(asked)


def test_a_damaged_image_is_named_before_training(blood: Path) -> None:
    image = blood / "BCCD" / "JPEGImages" / "cell_5.jpg"
    image.write_bytes(image.read_bytes()[:-200])
    with pytest.raises(NormkitError, match=r"cell_5\.jpg"):
        make_task(setting(blood)).locate(setting(blood))


def test_what_does_not_fit_together_is_refused(blood: Path) -> None:
    with pytest.raises(OptionError, match=r"'digits', which has a label.*Try bccd, nuclei"):
        make_task(setting(blood, data=Data("digits")))
    # an unknown name was said to have "a label for each image"
    with pytest.raises(NormkitError, match=r"there is no data set 'bcd'\. Did you mean 'bccd'"):
        make_task(setting(blood, data=Data("bcd")))
    sources.PUBLISHED["bccd"] = sources.BCCD  # with its number of images; the fixture puts it back
    with pytest.raises(NormkitError, match=r"has 4 and 2 images.*own.*data\.name = \"voc-folder\""):
        load_sets(setting(blood))
    sources.PUBLISHED["bccd"] = dataclasses.replace(sources.BCCD, samples=(4, 2))
    with pytest.raises(OptionError, match=r"bccd has boxes and no masks"):
        load_sets(setting(blood, task=TaskSpec("detection", {"masks": True})))
    masks = make_task(setting(blood, task=TaskSpec("detection", {"masks": True})))
    model = build(Model("native:faster_rcnn", options=SMALL), 4, (3, 48, 64)).eval()
    with pytest.raises(OptionError, match=r"answers have no masks\. Try native:mask_rcnn"):
        masks.try_model(model, 1, 3, (3, 48, 64))
    with pytest.raises(OptionError, match="head_norms needs convolutions"):
        build(Model("native:faster_rcnn", options={**SMALL, "head_norms": True}), 4, (3, 48, 64))


def test_norms_are_where_the_papers_have_them() -> None:
    def many(**options: object) -> int:
        model = build(Model("native:mask_rcnn", options={**SMALL, **options}), 4, (3, 48, 64))
        return sum(isinstance(each, torch.nn.BatchNorm2d) for each in model.modules())

    assert many() == 20
    assert many(frozen=True) == 0
    # eight convolutions of the pyramid, four of each head
    assert many(head="4conv1fc", head_norms=True) == 20 + 8 + 4 + 4


def test_the_variants_of_estimation_shift_can_be_made() -> None:
    folder = Path(__file__).parents[3] / "experiments"
    experiment = read(folder / "estimation-shift-table-5.toml", "paper")
    assert len(experiment.variants) == 6
    made = {}
    for variant in experiment.variants:
        options = {**variant.setting.model.options, **SMALL}
        small = dataclasses.replace(
            variant.setting, model=Model("native:faster_rcnn", options=options)
        )
        made[variant.name, options["head"]] = build_variant(
            small, 3, (3, 48, 64), seed=1, task=make_task(small)
        )

    def batch_free(name: str, part: str) -> int:
        model = made[name, "4conv1fc"].get_submodule(part)
        kinds = [type(each).__name__ for each in model.modules()]
        return sum(kind in ("GN", "GroupNorm") for kind in kinds)

    assert (batch_free("gn", "backbone.fpn"), batch_free("gn", "roi_heads")) == (8, 4)
    mixed = "xbn, gn in heads"
    assert (batch_free(mixed, "backbone.fpn"), batch_free(mixed, "roi_heads")) == (8, 4)
    # one of two norms in each of eight blocks, and the stem
    assert batch_free(mixed, "backbone.body") == batch_free("gn", "backbone.body") - 11
    frozen = {type(each).__name__ for each in made["bn frozen", "2fc"].modules()}
    assert "FrozenBatchNorm2d" in frozen
    assert not frozen & {"BN", "BatchNorm2d"}


def coco_files(root: Path) -> list[Path]:
    parts = ("train2017", "val2017")
    files = [root / "annotations" / f"instances_{each}.json" for each in parts]
    return [*files, *(root / each for each in parts)]


def test_coco_is_read_by_its_annotations(tmp_path: Path) -> None:
    (tmp_path / "annotations").mkdir()
    square = [[10, 10, 30, 10, 30, 30, 10, 30]]
    one = {"image_id": 7, "category_id": 18, "bbox": [10, 10, 20, 20], "segmentation": square}
    runs = {"counts": [0, 48 * 64], "size": [48, 64]}
    crowd = {**one, "bbox": [0, 0, 64, 48], "iscrowd": 1, "segmentation": runs}
    for part in ("train2017", "val2017"):
        (tmp_path / part).mkdir()
        Image.new("RGB", (64, 48)).save(tmp_path / part / "000007.jpg")
        content = {
            "categories": [{"id": 18, "name": "dog"}, {"id": 2, "name": "bicycle"}],
            "images": [
                {"id": 7, "file_name": "000007.jpg", "height": 48, "width": 64},
                {"id": 8, "file_name": "000008.jpg", "height": 48, "width": 64},
            ][: 2 if part == "train2017" else 1],
            "annotations": [one, crowd],
        }
        (tmp_path / "annotations" / f"instances_{part}.json").write_text(json.dumps(content))
    listing = coco(coco_files(tmp_path))
    assert (len(listing.train), len(listing.test), listing.classes) == (1, 1, 2)
    assert listing.train.objects[0].labels.tolist() == [2]
    assert listing.test.objects[0].crowd.tolist() == [False, True]
    _, target = BoxLoader(listing.train, None, False, masks=True).data[0]
    assert int(target["masks"].sum()) == pytest.approx(400, abs=45)  # edges are rounded


POLYGON = [[10, 10, 30, 10, 30, 30, 10, 30]]
RUNS = {"counts": [0, 12 * 16], "size": [12, 16]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bbox": None}, r"train2017\.json: entry 0 of annotations lacks 'bbox'"),
        ({"bbox": [1, 2, 3]}, r"image 7: entry 0 of annotations has the box \[1, 2, 3\]"),
        ({"bbox": [float("nan"), 2, 3, 4]}, r"image 7: box 1 is not finite"),
        ({"bbox": [50, 10, 20, 20]}, r"image 7: box 1, 50 to 70 × 10 to 30, leaves the image"),
        ({"category_id": 5}, r"image 7 has category 5, which is not listed"),
        ({"segmentation": None}, r"a\.png: object 1 has no segmentation"),
        ({"segmentation": [[1, 2]]}, r"a\.png: object 1 has a polygon of 2 numbers"),
        ({"segmentation": RUNS}, r"object 1 has a mask of 16×12 pixels, and the image 64×48"),
        ({"images": "none"}, r"train2017\.json has no list of images"),
        ({"height": 24}, r"a\.png has 64×48 pixels, and its annotation says 64×24"),
    ],
)
def test_annotations_of_coco_that_cannot_be_are_named(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    """A bare KeyError, ValueError or AttributeError came of most of them, and a mask of another
    size was stretched over the image."""
    one = {"image_id": 7, "category_id": 18, "bbox": [10, 2, 20, 20], "segmentation": POLYGON}
    image = {"id": 7, "file_name": "a.png", "height": 48, "width": 64}
    content = {"categories": [{"id": 18}], "images": [image], "annotations": [one]}
    for table in (one, image, content):
        table.update({key: value for key, value in change.items() if key in table})  # type: ignore[attr-defined]
    (tmp_path / "annotations").mkdir()
    for part in ("train2017", "val2017"):
        (tmp_path / part).mkdir()
        Image.new("RGB", (64, 48)).save(tmp_path / part / "a.png")
        (tmp_path / "annotations" / f"instances_{part}.json").write_text(json.dumps(content))

    def read_all() -> None:
        listing = coco(coco_files(tmp_path))
        check_outlines(listing.train)
        BoxLoader(listing.train, None, False, masks=True)

    with pytest.raises(NormkitError, match=message):
        read_all()


def test_objects_of_own_data_are_looked_at() -> None:
    """Torchvision says so of boxes without area alone; a label beyond the classes ended in an
    index error, on a GPU in a failed assertion of a kernel."""
    image, box = torch.rand(3, 48, 64), torch.tensor([[4.0, 4, 20, 20], [5, 5, 60, 40]])
    fine = {"boxes": box, "labels": torch.tensor([1, 3]), "masks": torch.ones(2, 48, 64)}
    check_targets([image], [fine], 3, True)
    check_targets([image], [{"boxes": torch.zeros(0, 4), "labels": torch.zeros(0)}], 3, False)
    for change, message in (
        (
            {"boxes": box + 5},
            r"Sample 2 of a batch, 64×48 pixels: box 2 \(10, 10, 65, 45; label 3\)",
        ),
        ({"boxes": box[:, [0, 1, 0, 3]]}, r"box 1 \(4, 4, 4, 20; label 1\) has no area"),
        ({"labels": torch.tensor([1, 4])}, r"box 2 .*label 4\) has a label that is none of 1 to 3"),
        ({"labels": torch.tensor([0, 1])}, r"box 1 .*label 0\)"),
        ({"labels": torch.tensor([1])}, r"\(2, 4\) and \(1,\), expected \(n, 4\) and \(n,\)"),
        ({"masks": torch.ones(2, 24, 64)}, r"masks are \(2, 24, 64\), expected \(2, 48, 64\)"),
        ({"masks": None}, r"its target has no masks"),
    ):
        with pytest.raises(NormkitError, match=message):
            check_targets([image, image], [fine, {**fine, **change}], 3, True)
    with pytest.raises(NormkitError, match="2 images and 1 targets"):
        check_targets([image, image], [fine], 3, False)


@pytest.mark.filterwarnings("ignore:.*has no area")
def test_the_real_sets() -> None:
    if not os.environ.get("NORMKIT_DATA"):
        pytest.skip("NORMKIT_DATA is not set: BCCD and nuclei are not there")
    try:
        blood, cells = box_listing(Data("bccd")), box_listing(Data("nuclei"))
    except NormkitError as error:
        pytest.skip(str(error))
    assert sum(len(each.labels) for p in (blood.train, blood.test) for each in p.objects) == 4886
    assert (len(cells.train), len(cells.test)) == (531, 133)


def test_without_resize_a_test_image_stays_as_it_is() -> None:
    # torchvision's _skip_resize is for training alone: windows of 256 pixels were learned from, and
    # test images scaled to 800, so that nuclei were three times as large as any that were learned
    network = faster_rcnn(2, (3, 64, 64), backbone="resnet18", resize=False).eval()
    image = torch.rand(3, 40, 56)
    batch, _ = network.transform([image])
    assert batch.image_sizes == [(40, 56)]


def test_frozen_norms_that_a_variant_replaces_are_told(blood: Path) -> None:
    frozen = Model("native:faster_rcnn", options={**SMALL, "frozen": True})
    with pytest.raises(OptionError, match='norm = "gn" of the variant replaces the frozen norms'):
        make_task(setting(blood, model=frozen))
    for steps in ((), (ModelStep("norm", "gn", "roi_heads.*"),)):
        make_task(setting(blood, model=frozen, steps=steps))


def test_a_classifier_is_not_given_boxes(blood: Path) -> None:
    with pytest.raises(OptionError, match=r"'bccd', which has .*task"):
        make_task(setting(blood, task=TaskSpec("classification")))


def test_masks_of_a_set_without_any_are_told_before_training(blood: Path) -> None:
    given = setting(blood, task=TaskSpec("detection", {"masks": True}))
    with pytest.raises(OptionError, match="bccd has boxes and no masks"):
        make_task(given).locate(given)
