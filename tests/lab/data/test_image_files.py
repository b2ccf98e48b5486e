"""Sets of image files: layouts, worker processes, and what is drawn for an image."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
import scipy.io
import torch
from torchvision.transforms.v2 import functional as vision

from normkit.lab.data import CorruptData, FileLoader, MissingData, load, locate
from normkit.lab.data.trees import FileTree
from normkit.lab.experiment import Data

from .small_files import picture, pixels, tree


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tree(tmp_path / "train", {"ant": 4, "bee": 3, "cat": 5})
    tree(tmp_path / "test", {"ant": 2, "bee": 2, "cat": 2})
    return tmp_path


def spec_for(folder: Path, **said: object) -> Data:
    return Data("folder", path=str(folder), **{"size": 16, **said})


def test_a_forked_process_opens_a_zip_file_for_itself(tmp_path: Path) -> None:
    """Workers of PACS as a zip file read it through the parent's open file, each moving the place
    where the others were about to read: "Bad magic number for file header"."""
    with zipfile.ZipFile(tmp_path / "set.zip", "w") as archive:
        for number in range(200):
            archive.writestr(f"set/{number}.txt", str(number))
    packed = FileTree(tmp_path / "set.zip", ("set",))
    place = packed._zip().fp.tell()  # type: ignore[union-attr]
    child = os.fork()
    if child == 0:  # no pytest, no clean-up
        right = packed.open("199.txt").read() == b"199"
        os._exit(0 if right else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert packed._zip().fp.tell() == place  # type: ignore[union-attr]
    assert packed.open("7.txt").read() == b"7"


def test_folder(folder: Path) -> None:
    sets = load(spec_for(folder, normalize="none"))
    assert isinstance(sets.train, FileLoader)
    assert (len(sets.train), len(sets.test), sets.classes, sets.shape) == (12, 6, 3, (3, 16, 16))
    images, labels = next(sets.test.batches(6))
    assert labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert torch.equal((images[:, 0, 8, 8] * 255 / 50).round().long(), labels)  # by their red
    assert images.dtype == torch.float32
    assert locate(spec_for(folder)) == folder


def test_evaluation_cuts_out_the_middle(folder: Path) -> None:
    image = torch.from_numpy(pixels(40, 30, 3, seed=0)).permute(2, 0, 1).clone()
    image[0] = 0
    resized = vision.resize(image, [18], antialias=True)  # 16 · 8/7
    expected = vision.center_crop(resized, [16, 16]).float() / 255
    images, _ = next(load(spec_for(folder, normalize="none")).train.batches(1))
    assert (images[0] - expected).abs().max() < 2**-22


def test_validation_and_subset(folder: Path) -> None:
    sets = load(spec_for(folder, validation=0.25, subset=6))
    assert sets.validation is not None
    assert (len(sets.train), len(sets.validation)) == (6, 3)
    assert not set(sets.train.files.paths) & set(sets.validation.files.paths)
    assert sorted(sets.validation.files.labels.tolist()) == [0, 1, 2]


AUGMENTED = [
    {"flip": True, "resized_crop": True},
    {"flip": True, "crop": 2},
    {"rotation": 30.0, "cutout": 6},
]


@pytest.mark.parametrize("said", AUGMENTED, ids=lambda said: "-".join(said))
def test_small_sets_stay_in_memory(folder: Path, said: dict[str, object]) -> None:
    """Files were decoded again in every epoch, by processes started anew each time. What is kept
    must be the image before it is cut: a crop is a view of it, and a cutout writes."""
    kept, other = (load(spec_for(folder, **said)).train for _ in range(2))
    assert isinstance(kept, FileLoader)
    assert isinstance(other, FileLoader)
    other.data.keep = False
    for epoch in range(2):
        given = {"seed": 1, "epoch": epoch, "shuffle": True, "augment": True}
        first, second = (next(each.batches(12, **given))[0] for each in (kept, other))
        assert torch.equal(first, second)
    assert len(kept.data.kept) == (0 if "resized_crop" in said else 12)
    for path in kept.files.paths:
        Path(path).unlink()
    if "resized_crop" not in said:
        next(kept.batches(12))


@pytest.mark.parametrize("said", AUGMENTED, ids=lambda said: "-".join(said))
def test_seed_and_epoch_decide(folder: Path, said: dict[str, object]) -> None:
    train = load(spec_for(folder, **said)).train

    def epoch_of(**other: object) -> torch.Tensor:
        usual = {"seed": 1, "epoch": 0, "shuffle": True, "augment": True}
        return torch.cat([images for images, _ in train.batches(5, **{**usual, **other})])

    state = torch.get_rng_state()
    first = epoch_of()
    assert torch.equal(first, epoch_of())
    assert torch.equal(first[5:], epoch_of(start=1))
    assert len(epoch_of(drop_last=True)) == 10
    for other in ({"seed": 2}, {"epoch": 1}, {"augment": False}):
        assert not torch.equal(first, epoch_of(**other))
    assert torch.equal(state, torch.get_rng_state())


def test_workers_change_nothing(folder: Path) -> None:
    said = {"seed": 3, "epoch": 1, "shuffle": True, "augment": True}
    alone, two = (
        list(load(spec_for(folder, **AUGMENTED[0]), workers=count).train.batches(4, **said))
        for count in (0, 2)
    )
    for (images, labels), (others, same) in zip(alone, two, strict=True):
        assert torch.equal(images, others)
        assert torch.equal(labels, same)


def test_cutout_is_the_mean(folder: Path) -> None:
    train = load(spec_for(folder, cutout=40)).train
    images, _ = next(train.batches(12, augment=True))
    # half a byte, over the smallest standard deviation of ImageNet's channels
    assert images.abs().max() <= 0.5 / 255 / 0.224 + 1e-6


def test_a_damaged_image_is_named(folder: Path) -> None:
    (folder / "train" / "bee" / "1.png").write_bytes(b"no image")
    with pytest.raises(CorruptData, match=r"bee/1\.png cannot be read as an image"):
        list(load(spec_for(folder)).train.batches(12))
    with pytest.raises(CorruptData, match=r"bee/1\.png cannot be read as an image"):
        list(load(spec_for(folder), workers=1).train.batches(12))


def test_gray_images_become_coloured(tmp_path: Path) -> None:
    for part in ("train", "val"):
        picture(tmp_path / part / "one" / "a.jpg", pixels(20, 20))
    images, _ = next(load(spec_for(tmp_path)).train.batches(1))
    assert images.shape == (1, 3, 16, 16)


def test_bad_folders(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(MissingData, match=r"not found in \S*nowhere.*data\.path/train/CLASS"):
        locate(spec_for(tmp_path / "nowhere"))
    (folder / "test" / "dog").mkdir()
    with pytest.raises(CorruptData, match=r"classes that .* lacks: dog"):
        load(spec_for(folder))
    empty = tmp_path / "empty"
    for part in ("train", "test"):
        (empty / part / "ant").mkdir(parents=True)
    with pytest.raises(MissingData, match="has no images"):
        load(spec_for(empty))


def test_imagenet_counts_its_images(tmp_path: Path, publish) -> None:
    for part, count in (("train", 3), ("val", 1)):
        tree(tmp_path / "imagenet" / part, {"n01": count, "n02": count})
    spec = Data("imagenet", path=str(tmp_path), size=16)
    assert locate(spec) == tmp_path / "imagenet"
    with pytest.raises(CorruptData, match=r"has 6 and 2 images .* expected 1,281,167 and 50,000"):
        load(spec)
    publish("imagenet", tmp_path, (6, 2))
    assert load(spec).classes == 2


def cub(folder: Path) -> None:
    rows = [("1", "001.Ant/a.jpg", "1", "1"), ("2", "001.Ant/b.jpg", "1", "0")]
    rows += [("3", "002.Bee/c.jpg", "2", "1"), ("4", "002.Bee/d.jpg", "2", "0")]
    folder.mkdir()
    for file, column in (("images", 1), ("image_class_labels", 2), ("train_test_split", 3)):
        text = "".join(f"{row[0]} {row[column]}\n" for row in rows)
        (folder / f"{file}.txt").write_text(text)
    for row in rows:
        picture(folder / "images" / row[1], pixels(20, 30, 3))


def test_cub(tmp_path: Path, publish) -> None:
    cub(tmp_path / "CUB_200_2011")
    publish("cub200", tmp_path, (2, 2))
    spec = Data("cub200", path=str(tmp_path), size=16, crop=2, flip=True)
    sets = load(spec)
    assert [Path(path).name for path in sets.train.files.paths] == ["a.jpg", "c.jpg"]
    assert sets.test.files.labels.tolist() == [0, 1]
    assert next(sets.train.batches(2, augment=True))[0].shape == (2, 3, 16, 16)
    (tmp_path / "CUB_200_2011" / "images" / "002.Bee" / "c.jpg").unlink()
    with pytest.raises(MissingData, match=r"c\.jpg is listed, but is not there.*CUB_200_2011\.tgz"):
        load(spec)


def annotations(file: Path, names: list[str], classes: list[int]) -> None:
    rows = np.empty((1, len(names)), dtype=[("class", object), ("fname", object)])
    for i, (name, label) in enumerate(zip(names, classes, strict=True)):
        rows[0, i] = (label, name)
    file.parent.mkdir(parents=True, exist_ok=True)
    scipy.io.savemat(file, {"annotations": rows})


def test_cars(tmp_path: Path, publish) -> None:
    home = tmp_path / "stanford_cars"
    annotations(home / "devkit" / "cars_train_annos.mat", ["1.jpg", "2.jpg", "3.jpg"], [1, 2, 1])
    annotations(home / "cars_test_annos_withlabels.mat", ["1.jpg", "2.jpg"], [2, 1])
    for part, count in (("cars_train", 3), ("cars_test", 2)):
        for number in range(1, count + 1):
            picture(home / part / f"{number}.jpg", pixels(20, 20, 3, seed=number))
    publish("stanford-cars", tmp_path, (3, 2))
    assert locate(Data("stanford-cars", path=str(tmp_path))) == home
    sets = load(Data("stanford-cars", path=str(tmp_path), size=16))
    assert sets.train.files.labels.tolist() == [0, 1, 0]
    assert next(sets.test.batches(2))[1].tolist() == [1, 0]
